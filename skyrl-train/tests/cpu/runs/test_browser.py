"""A run on web pages in Chromium: screenshots of every turn are trained on."""

from pathlib import Path

import pytest
from train_kit.models import set_context_length
from train_kit.runs import small_run, train_with
from train_kit.vision_models import save_vision_model

from examples.browser.browser_dataset import main as write_browser_dataset
from skyrl_gym.envs.browser import chromium
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.types import Trajectory

pytest.importorskip("playwright")
if not any(map(chromium.shutil.which, chromium.EXECUTABLES)):
    pytest.skip("Chromium is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision-language model whose context has room for the description of the tool in many small tokens."""
    folder = save_vision_model(tmp_path_factory.mktemp("model") / "idefics3", "idefics3")
    return set_context_length(folder, 8192)


class Recorder(Callback):
    """Keeps the trajectories of all steps."""

    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        self.trajectories += report.trajectories


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_screenshots_are_trained_on(isolation: str, vision_model: Path, tmp_path: Path) -> None:
    write_browser_dataset(["--output_dir", str(tmp_path / "data"), "--num_tasks", "10"])
    recorder = Recorder()
    overrides = small_run(
        tmp_path,
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_training_steps=1",
        "trainer.max_prompt_length=8000",
        "generator.n_samples_per_prompt=2",
        "generator.max_turns=2",
        "environment.skyrl_gym.max_env_workers=2",
        f"environment.skyrl_gym.isolation={isolation}",
        model=vision_model,
        data=tmp_path / "data/train.parquet",
    )
    run = train_with(*overrides, first=[recorder])
    chromium.end_all()
    (step,) = (step for step in run.metrics if step["step"] == 1)
    assert step["generate/n_invalid"] == 0
    assert step["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
    assert step["environment/steps"] == 2
    assert len(recorder.trajectories) == 4
    for trajectory in recorder.trajectories:
        (segment,) = trajectory.segments
        first, second = segment.images
        assert (first.image.width, first.image.height) == (640, 480)
        assert first.image == second.image  # the model's reply was no action
        assert first.end <= segment.n_prompt <= second.start
