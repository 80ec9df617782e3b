"""The common part of the learning examples, with a budget too small to learn anything."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from train_kit.runs import Run

from examples import learning
from examples.learning import LearningRun, main
from examples.multiply.learn import RECIPE

pytestmark = pytest.mark.usefixtures("short_start")

TINY = dataclasses.replace(RECIPE, n_start_steps=2, n_steps=1)
FAST = ["trainer.train_batch_size=9", "generator.n_samples_per_prompt=2"]


def run(output_dir: Path, *overrides: str, recipe: learning.Recipe = TINY) -> Any:
    """Return the exit status."""
    with pytest.raises(SystemExit) as status:
        main(recipe, "A test.", ["--output_dir", str(output_dir), "--seed", "3", *FAST, *overrides])
    return status.value.code


def test_a_model_that_has_not_learned_gives_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An earlier finished run is moved aside, and an unfinished one resumes."""
    folder = tmp_path / "multiply/seed3"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": TINY.n_steps}) + "\n")
    assert run(tmp_path) == 1
    output = capsys.readouterr().out
    assert re.search(r"random attempts +5\.6%.*\n +before training +\d.*\n +after +\d", output)
    assert "FAILED: 95% required" in output
    for name in ("learning_curve.png", "report.html", "export/global_step_1/policy/config.json"):
        assert (folder / name).stat().st_size > 0
    assert Run(folder).steps == [0, 1]
    (before,) = (tmp_path / "multiply").glob("seed3-before-*")
    assert [path.name for path in before.iterdir()] == ["metrics.jsonl"]
    longer = dataclasses.replace(TINY, n_steps=2)
    assert not LearningRun(longer, tmp_path, 3, 2).is_finished
    assert run(tmp_path, recipe=longer) == 1
    assert len(list((tmp_path / "multiply").glob("seed3*"))) == 2
    assert Run(folder).steps == [0, 1, 2]
    assert "Resumed from" in Run(folder).log


def test_the_required_score_decides_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing measurements are not printed."""
    assert run(tmp_path, "trainer.eval_before_train=false", recipe=dataclasses.replace(TINY, required=0.0)) == 0
    output = capsys.readouterr().out
    assert "Passed: 0% required" in output
    assert "random attempts" in output
    assert "before training" not in output
    assert re.search(r"\n +after +\d", output)


def test_without_evaluations_the_run_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "trainer.eval_interval=-1") == 1
    assert "error: trainer.eval_interval=-1 turns evaluation off" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
