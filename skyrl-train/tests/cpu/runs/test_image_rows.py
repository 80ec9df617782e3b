"""Runs on rows with images."""

from pathlib import Path

import pytest
from train_kit.datasets import write_rows
from train_kit.messages import user
from train_kit.runs import expect_error, small_run, train
from train_kit.vision_models import write_pictures


def vision_run(folder: Path, model: Path) -> list[str]:
    write_pictures(folder)
    answer = {"ground_truth": "7"}
    rows = [
        {"prompt": [user(f"{i} <image>?")], "images": [f"{i % 4}.png"], "env_class": "gsm8k", "reward_spec": answer}
        for i in range(8)
    ]
    files = {name: Path(write_rows(folder, rows, f"{name}.jsonl")) for name in ("data", "val_data")}
    return small_run(folder, "trainer.dump_trajectories=true", model=model, **files)


def test_the_engine_and_the_trainer_read_the_images_of_rows(vision_model_path: Path, tmp_path: Path) -> None:
    run = train(*vision_run(tmp_path, vision_model_path))
    for step in run.metrics[1:]:
        assert step["generate/n_invalid"] == 0
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
    for row in [*run.trajectories(1), *run.trajectories(2)]:
        (name,) = row["images"]
        assert row["input_prompt"].count(f"<|image:{name[:8]}|>") == 1


@pytest.mark.parametrize("role", ["policy", "critic", "ref"])
def test_images_of_a_text_model_are_refused(
    role: str, tiny_model_path: Path, vision_model_path: Path, tmp_path: Path
) -> None:
    run = vision_run(tmp_path, vision_model_path)
    run.append(f"trainer.{role}.model.path='{tiny_model_path}'")
    if role == "critic":
        run += ["trainer.algorithm.advantage_estimator=gae", "trainer.critic_mini_batch_size=4"]
    run += ["trainer.algorithm.use_kl_loss=true"] if role == "ref" else []
    message = expect_error(*run)
    assert f"row 0 of {tmp_path}/data.jsonl has images in the column 'images', but {tiny_model_path} reads" in message
