"""Metrics backends with the constructor of SkyRL."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from skyrl_report.metrics_file import read_metrics
from skyrl_train.compat.skyrl.tracking import Tracking
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli


def test_an_experiment_of_skyrl_opens_the_backends(catch_run: list[str], tmp_path: Path) -> None:
    class Experiment(RLExperiment):
        def get_tracker(self) -> Tracking:
            return Tracking(
                project_name=self.cfg.trainer.project_name,
                experiment_name=self.cfg.trainer.run_name,
                backends=self.cfg.trainer.logger,
                config=self.cfg,
            )

    cfg = parse_cli([*catch_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"])
    Experiment(cfg).run()
    rows = read_metrics(tmp_path / "skyrl/test_run/metrics.jsonl")
    assert rows[-1]["step"] == 1


@pytest.mark.parametrize("config", [None, {"seed": 1}, OmegaConf.create({"seed": 1})])
def test_without_a_run_folder_metrics_are_in_outputs(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Tracking("words", "first", config=config) as tracking:
        tracking.log({"score": 0.5}, step=2, commit=True)
    assert read_metrics(Path("outputs/words/first/metrics.jsonl")) == [{"step": 2, "score": 0.5}]
    assert "score 0.5" in capsys.readouterr().out
