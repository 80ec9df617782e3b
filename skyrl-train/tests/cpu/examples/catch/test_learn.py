"""`make catch` end to end, with a budget too small to learn anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyrl_gym
from examples.catch import learn, warm_start


@pytest.fixture
def output_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(warm_start, "N_CONVERSATIONS", 64)
    monkeypatch.setattr(warm_start, "N_STEPS", 2)
    yield tmp_path
    skyrl_gym.envs.deregister("catch")


def test_a_model_that_has_not_learned_gives_exit_status_1(output_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        learn.main(["--steps", "1", "--output_dir", str(output_dir), "--seed", "3"])
    assert status.value.code == 1
    output = capsys.readouterr().out
    for words in (
        r"random play +13\.9%",
        "before training",
        "after training",
        r"optimal player +95\.8%",
        "FAILED",
    ):
        assert re.search(words, output)
    for name in ("learning_curve.png", "report.html", "metrics.jsonl"):
        assert (output_dir / "catch/shaped-seed3" / name).stat().st_size > 0


@pytest.mark.nightly
def test_a_finished_run_is_moved_aside(output_dir: Path) -> None:
    run = ["--steps", "1", "--output_dir", str(output_dir)]
    for _ in range(2):
        with pytest.raises(SystemExit):
            learn.main(run)
        skyrl_gym.envs.deregister("catch")
    learn.register_catch()
    (before,) = (output_dir / "catch").glob("shaped-seed42-before-*")
    for folder in (before, output_dir / "catch/shaped-seed42"):
        assert (folder / "metrics.jsonl").read_text().count("\n") == 2
        assert (folder / "report.html").exists()
