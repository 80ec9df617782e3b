from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyrl_train.entrypoints.cli import main


def test_env_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_spec": {"ground_truth": "42"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert main(["env", "check", "multiply", "--data", str(tmp_path / "rows.jsonl")]) == 0
    assert "multiply: 11 kept, 0 broken" in capsys.readouterr().out


def test_train_runs(catch_run: list[str], tmp_path: Path) -> None:
    assert main(["train", *catch_run, "trainer.max_training_steps=1", "trainer.eval_interval=-1"]) == 0
    assert (tmp_path / "skyrl/test_run/report.html").is_file()


def test_generate_runs(catch_run: list[str], tmp_path: Path) -> None:
    assert main(["generate", *catch_run]) == 0
    assert (tmp_path / "skyrl/test_run/evals/eval_only/aggregated_results.jsonl").is_file()


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["trian"], 2)])
def test_usage_lists_the_commands(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == status
    captured = capsys.readouterr()
    assert "skyrl env check module:Env" in (captured.err if status else captured.out)
