"""Runs with images: exact, resumable, asynchronous, with adapters and on two ranks, as with text."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_kit.runs import Run, assert_equal_runs, read_lines, stop_after, train
from train_kit.vision_models import each_family, picture, picture_run, save_vision_model
from transformers import AutoModelForImageTextToText, AutoProcessor

from skyrl_gym.images import read_image
from skyrl_train.entrypoints.cli import main


def train_pictures(folder: Path, *overrides: str, model: Path, name: str = "test_run") -> Run:
    return train(*picture_run(folder, *overrides, model=model, name=name))


def check(run: Run, last_step: int = 2, gap: float = 1e-6) -> None:
    for step in run.metrics[1 : last_step + 1]:
        assert step["policy/rollout_train_logprobs_abs_diff_mean"] < gap
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
        run = train_pictures(tmp_path, *overrides, model=model, name=name)
        check(run, gap=2e-6 if family == "qwen3_5" else 1e-6)  # its recurrent layers round more
        if name == "adapter":  # the model and its files may name tensors differently
            assert main(["merge", "checkpoint", str(run.folder / "ckpts"), str(tmp_path / "merged")]) == 0


def test_an_export_has_the_image_processor(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "idefics3")
    export = train_pictures(tmp_path, model=model).export(2)
    AutoProcessor.from_pretrained(export)
    AutoModelForImageTextToText.from_pretrained(export)
    check(train_pictures(tmp_path, model=export, name="continued"))


def test_a_critic_reads_images(tmp_path: Path) -> None:
    """Its values start at zero. It trains its image encoder on request, and is exported, merged and used again."""
    model = save_vision_model(tmp_path / "model", "idefics3")
    before, everything = load_file(model / "model.safetensors"), "trainer.critic.model.freeze_vision=false"
    lora = ["trainer.critic.model.lora.rank=4", "trainer.critic.model.lora.merge_on_export=true"]
    for name, settings in {
        "adapter": [*lora, everything],
        "everything": [everything, "trainer.micro_train_batch_size_per_gpu=1"],
        "language": [],
    }.items():
        run = train_pictures(tmp_path, *with_critic(model), *settings, model=model, name=name)
        check(run)
        first, second = run.metrics[1:3]
        assert first["critic/grad_norm"] > 0
        assert first["critic/values_mean"] == 0 != second["critic/values_mean"]
        after = run.weights(2, "critic")
        assert {"score.weight", "score.bias"} <= after.keys()
        trained = {key for key in before.keys() & after.keys() if not torch.equal(before[key], after[key])}
        assert trained
        assert any("vision" in key for key in trained) == (name != "language")
        merged = tmp_path / f"merged-{name}"
        assert main(["merge", "checkpoint", str(run.folder / "ckpts"), str(merged), "--role=critic"]) == 0
        tensors = load_file(merged / "model.safetensors")
        assert tensors.keys() == after.keys()
        for key, tensor in after.items():
            torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=1e-6, msg=key)
    continued = train_pictures(tmp_path, *with_critic(merged), model=model, name="continued")
    assert continued.metrics[1]["critic/values_mean"] != 0


def with_critic(path: Path) -> list[str]:
    """Return the overrides of a run with the critic at `path`."""
    return [
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path='{path}'",
        "trainer.critic.optimizer_config.lr=1e-2",
        "trainer.critic_mini_batch_size=4",
    ]


def test_a_run_keeps_its_images_in_files_and_shows_them(tmp_path: Path) -> None:
    """Training and evaluation trajectories name their images; the report shows them; both are in remote storage."""
    model = save_vision_model(tmp_path / "model", "idefics3")
    evaluates = [f"data.val_data=['{tmp_path}/rows.jsonl']", f"trainer.remote_trajectory_url=file://{tmp_path}/remote"]
    settings = [*evaluates, "trainer.eval_interval=2", "trainer.dump_trajectories=true"]
    run = train_pictures(tmp_path, *settings, model=model)
    folders = {run.folder / "evals": "evals/*/unknown.jsonl", run.folder / "trajectories": "trajectories/*.jsonl"}
    generated = train(*picture_run(tmp_path, *evaluates, model=model, name="generated"), command="generate")
    folders[generated.folder / "evals"] = "evals/eval_only/unknown.jsonl"
    for folder, files in folders.items():
        found = set()
        for episode in [row for file in folder.parent.glob(files) for row in read_lines(file)]:
            seed = 10 * episode["env_extras"]["extra_info"]["seed"]
            images = [read_image(folder / "images" / name) for name in episode["images"]]
            assert images == [read_image(picture(seed + turn)) for turn in range(3)]
            text = episode["input_prompt"] + episode["output_response"]
            assert [text.count(f"<|image:{name[:8]}|>") for name in episode["images"]] == [1, 1, 1]
            found |= set(episode["images"])
        assert len(found) == 24, "8 rows with 3 pictures each"
        assert {path.name for path in (folder / "images").iterdir()} == found
    for own in (run, generated):
        assert own.folder.joinpath("report.html").read_text().count('<img src="data:image/') >= 3 * 3
        remote = tmp_path / "remote/evals" / own.folder.name
        assert files_in(remote) == files_in(own.folder / "evals")


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_asynchronous_run_resumes_with_images(tmp_path: Path) -> None:
    """The rollouts in progress at the stop are played again, with their images."""
    model = save_vision_model(tmp_path / "model", "idefics3")
    asynchronous = ["trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"]
    settings = [*asynchronous, "trainer.ckpt_interval=1", "trainer.max_training_steps=3", "trainer.epochs=2"]
    settings.append("trainer.dump_trajectories=true")
    stop_after(1, *picture_run(tmp_path, *settings, model=model))
    run = train_pictures(tmp_path, *settings, model=model)
    assert run.steps[-3:] == [1, 2, 3]
    for step in run.steps[-3:]:
        assert [len(row["images"]) for row in run.trajectories(step)] == [3] * 16
    assert all(metrics["generate/n_invalid"] == 0 for metrics in run.metrics[-3:])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    model = save_vision_model(tmp_path / "model", "gemma3")
    # Together, all rollouts have the same neighbors in both runs. Padding may change the last bit of a log-prob.
    settings = ["generator.batched=true", "trainer.ckpt_interval=1", "trainer.max_training_steps=3", "trainer.epochs=2"]
    settings += with_critic(model)
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
