"""The examples that train a vision-language model, with a budget too small to learn anything."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import skyrl_gym
from examples import learning, tiny_vision_model
from examples.browser import learn as browser
from examples.catch import recipe
from examples.catch.catch_dataset import CatchDataset
from examples.catch_pixels import learn as catch_pixels
from skyrl_gym.envs.browser.chromium import find_executable
from skyrl_gym.error import InvalidSettings

SMALL = ["trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4", "generator.n_samples_per_prompt=2"]


@pytest.fixture(autouse=True)
def _short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_vision_model, "N_STEPS", 2)
    monkeypatch.setattr(tiny_vision_model, "BATCH_SIZE", 4)


def run(main: Callable[[list[str]], None], output_dir: Path, *arguments: str) -> int:
    """Return the exit status."""
    with pytest.raises(SystemExit) as status:
        main(["--steps", "1", "--output_dir", str(output_dir), *arguments, *SMALL])
    return int(str(status.value.code))


def test_boards_are_drawn_and_blank_boards_are_all_black(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = partial(CatchDataset, train_size=16, test_size=8)
    monkeypatch.setattr(recipe, "CatchDataset", dataset)
    monkeypatch.setattr(catch_pixels, "CatchDataset", dataset)
    for label, flags in (("pixels", []), ("blank", ["--blank"])):
        assert run(catch_pixels.main, tmp_path, *flags) == 1
        skyrl_gym.envs.deregister("catch_pixels")
        folder = tmp_path / f"catch/{label}-shaped-seed42"
        assert (folder / "report.html").stat().st_size > 0
        assert (len(list((folder / "evals/images").iterdir())) == 1) == (label == "blank")


def test_the_page_with_a_button_is_learned_from_screenshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_executable(None)
    except InvalidSettings as error:
        pytest.skip(str(error))
    monkeypatch.setattr(browser, "N_TASKS", 10)
    small = dataclasses.replace(browser.RECIPE, required=1.1)
    assert run(partial(learning.main, small, browser.__doc__), tmp_path) == 1
    assert list((tmp_path / "browser/seed42/evals/images").glob("*.png"))
