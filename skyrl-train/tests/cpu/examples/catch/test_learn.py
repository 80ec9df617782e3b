"""`make catch` end to end, with a budget too small to learn anything."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import skyrl_gym
from examples.catch import learn, recipe, warm_start
from examples.catch.catch_dataset import CatchDataset

SMALL = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=2"]


@pytest.fixture
def output_dir(short_start: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(warm_start, "N_STEPS", 2)
    monkeypatch.setattr(recipe, "CatchDataset", partial(CatchDataset, train_size=64, test_size=48))
    yield tmp_path
    skyrl_gym.envs.deregister("catch")


def test_a_model_that_has_not_learned_gives_exit_status_1(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        learn.main(["--steps", "1", "--output_dir", str(output_dir), "--seed", "3", *SMALL])
    assert status.value.code == 1
    output = capsys.readouterr().out
    for words in (r"random play +1\d\.\d%", "before training", "after training", r"optimal player +\d+\.\d%", "FAILED"):
        assert re.search(words, output)
    for name in ("learning_curve.png", "report.html", "metrics.jsonl"):
        assert (output_dir / "catch/shaped-seed3" / name).stat().st_size > 0
