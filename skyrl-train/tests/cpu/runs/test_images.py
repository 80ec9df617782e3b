"""Runs with images: exact, resumable, asynchronous, with adapters and on two ranks, as with text."""

from pathlib import Path

import pytest
from train_kit.runs import Run, assert_equal_runs, stop_after, train
from train_kit.vision_models import each_family, picture_run, save_vision_model
from transformers import AutoModelForImageTextToText, AutoProcessor


def train_pictures(folder: Path, *overrides: str, model: Path, name: str = "test_run") -> Run:
    return train(*picture_run(folder, *overrides, model=model, name=name))


def check(run: Run, last_step: int = 2) -> None:
    for step in run.metrics[1 : last_step + 1]:
        assert step["policy/rollout_train_logprobs_abs_diff_mean"] < 2e-6
        assert step["policy/grad_norm"] > 0
        assert step["generate/n_invalid"] == 0


@each_family
def test_a_family_trains(family: str, tmp_path: Path) -> None:
    """Engine and trainer agree before and after updates, with the image encoder, without it, and with an adapter."""
    model = save_vision_model(tmp_path / "model", family)
    for name, overrides in {
        "language": [],
        "everything": ["trainer.policy.model.freeze_vision=false"],
        "adapter": ["trainer.policy.model.lora.rank=4"],
        "rows": ["generator.step_wise_trajectories=true"],
    }.items():
        check(train_pictures(tmp_path, *overrides, model=model, name=name))


def test_an_export_has_the_image_processor(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "idefics3")
    export = train_pictures(tmp_path, model=model).export(2)
    AutoProcessor.from_pretrained(export)
    AutoModelForImageTextToText.from_pretrained(export)
    check(train_pictures(tmp_path, model=export, name="continued"))


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "gemma3")
    # Together, all rollouts have the same neighbors in both runs. Padding may change the last bit of a log-prob.
    settings = ["generator.batched=true", "trainer.ckpt_interval=1", "trainer.max_training_steps=3", "trainer.epochs=2"]
    whole = train_pictures(tmp_path, *settings, model=model, name="whole")
    stop_after(2, *picture_run(tmp_path, *settings, model=model, name="parts"))
    assert_equal_runs(train_pictures(tmp_path, *settings, model=model, name="parts"), whole)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"],
        ["environment.skyrl_gym.isolation=process"],
        ["generator.batched=true"],
    ],
    ids=["asynchronous", "environments in processes", "batched"],
)
def test_images_pass_through_every_way_to_play(tmp_path: Path, overrides: list[str]) -> None:
    run = train_pictures(tmp_path, *overrides, model=save_vision_model(tmp_path / "model", "idefics3"))
    check(run, last_step=1 if "fully_async" in overrides[0] else 2)
