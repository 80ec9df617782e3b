from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from skyrl_report.errors import DataError
from skyrl_report.learning_curve import compare_curves, plot_learning_curve

RATE = "eval/environment/catch_rate"


def _rows(slope: float) -> list[dict[str, Any]]:
    evaluations = [{"step": step, RATE: min(1.0, 0.2 + slope * step)} for step in range(0, 31, 10)]
    return evaluations + [{"step": step, "environment/catch_rate": slope * step} for step in range(1, 31)]


def _has_colour(path: Path, colour: tuple[int, int, int]) -> bool:
    with Image.open(path) as image:
        return colour in {pixel for _, pixel in image.convert("RGB").getcolors(maxcolors=1 << 20) or []}


def test_the_plot_contains_evaluation_training_and_baselines(tmp_path: Path) -> None:
    path = plot_learning_curve(
        _rows(0.02),
        tmp_path / "run" / "learning_curve.png",
        metric=RATE,
        title="Catch",
        baselines={"random play": 0.2},
        train_metric="environment/catch_rate",
    )
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (1280, 768)
    assert _has_colour(path, (0x2F, 0x6F, 0xDE))  # evaluation
    assert _has_colour(path, (0x8F, 0xA3, 0xC4))  # training rollouts
    assert _has_colour(path, (0x6A, 0x73, 0x83))  # baseline
    rows = [{"step": 0, RATE: 0.1}]  # one evaluation, and no training metric
    path = plot_learning_curve(rows, tmp_path / "a.png", metric=RATE, title="Catch", train_metric="environment/none")
    assert _has_colour(path, (0x2F, 0x6F, 0xDE))
    assert not _has_colour(path, (0x8F, 0xA3, 0xC4))


def test_each_run_has_its_own_colour(tmp_path: Path) -> None:
    runs = {"shaped": _rows(0.02), "episodic": _rows(0.01)}
    path = compare_curves(runs, tmp_path / "compare.png", metric=RATE, title="Shaped and episodic")
    assert _has_colour(path, (0x2F, 0x6F, 0xDE))
    assert _has_colour(path, (0xE0, 0x74, 0x2C))


def test_a_metric_that_a_run_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the run has no value of 'eval/all/avg_score'"):
        plot_learning_curve(_rows(0.1), tmp_path / "a.png", metric="eval/all/avg_score", title="Catch")
    with pytest.raises(DataError, match=r"^episodic has no value"):
        compare_curves({"shaped": _rows(0.1), "episodic": []}, tmp_path / "a.png", metric=RATE, title="Catch")
    assert not (tmp_path / "a.png").exists()
