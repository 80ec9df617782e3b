"""Checkpoints of a run: written while it trains, refused if they are damaged, and complete after an interrupt."""

import asyncio
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_kit.checkpoints import assert_a_changed_byte_is_named, flip_a_bit
from train_kit.runs import AtStepEnd, Run, catch_run, expect_error, run_of, train, train_with

import skyrl_gym
from examples.catch.main_catch import register_catch
from skyrl_train import callbacks
from skyrl_train.callbacks import Callback
from skyrl_train.checkpoint import CheckpointStore, durable
from skyrl_train.checkpoint.manifest import find_damage, write_manifest
from skyrl_train.learner import Learner
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.worker import Worker

SAVING = ["trainer.ckpt_interval=1", "trainer.eval_interval=-1", "generator.batched=true"]


@pytest.fixture
def saving_run(catch: None, tiny_model_path: Path, catch_data: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run of two steps with a checkpoint after each."""
    return catch_run(tmp_path, *SAVING, model=tiny_model_path, data=catch_data)


# -- saving


def test_training_continues_while_a_checkpoint_is_written(
    saving_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 1 is written only after step 2 is trained, and holds the weights of step 1."""
    step_2, sync_tree, waited = threading.Event(), durable.sync_tree, list[bool]()

    def sync_late(path: Path) -> None:
        if "global_step_1." in path.name:
            waited.append(step_2.wait(100))
        sync_tree(path)

    class SignallingTrainer(Trainer):
        async def update(self, step: Step, batch: TrainingBatch) -> None:
            await super().update(step, batch)
            if step.number == 2:
                step_2.set()

    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.checkpoint.store.sync_tree", sync_late)
        run = train_with(*saving_run, trainer=SignallingTrainer)
    assert waited == [True]
    assert torch.load(run.folder / "ckpts/global_step_2/driver.pt", weights_only=True)["global_step"] == 2
    metrics = run.reproducible_metrics
    shutil.rmtree(run.folder / "ckpts/global_step_2")
    (run.folder / "ckpts/latest_ckpt_global_step.txt").write_text("1")
    assert train(*saving_run).reproducible_metrics == metrics, "step 2 from the checkpoint of step 1 is step 2"


async def test_saving_does_not_block_the_event_loop_and_callbacks_follow_the_pointer(
    saving_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file sync waits until the event loop has run, so a blocked loop would never finish the save."""
    save, steps = CheckpointStore.save, list[int]()

    async def watch(self: CheckpointStore, *arguments: object) -> Path:
        loop, loop_ran = asyncio.get_running_loop(), list[bool]()

        def wait_for_the_loop(descriptor: int) -> None:
            ran = threading.Event()
            loop.call_soon_threadsafe(ran.set)
            loop_ran.append(ran.wait(100))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", wait_for_the_loop)
            path = await save(self, *arguments)  # type: ignore[arg-type]
        assert len(loop_ran) > 5
        assert all(loop_ran)
        return path

    class Recorder(Callback):
        async def on_checkpoint(self, run: callbacks.Run, path: Path) -> None:
            pointer = path.parent / "latest_ckpt_global_step.txt"
            assert path.name == f"global_step_{int(pointer.read_text())}"
            steps.append(run.global_step)

    monkeypatch.setattr(CheckpointStore, "save", watch)
    await asyncio.to_thread(train_with, *saving_run, "trainer.ckpt_interval=2", last=[Recorder()])
    assert steps == [2]


def test_a_stop_requested_after_the_checkpoint_of_a_step_saves_the_step(saving_run: list[str]) -> None:
    overrides = [*saving_run, "trainer.ckpt_interval=10"]
    stop = AtStepEnd(lambda run, step: step == 1 and run.request_stop("after the callback that saves"))
    with pytest.raises(KeyboardInterrupt):
        train_with(*overrides, last=[stop])
    assert run_of(overrides).checkpoints.steps() == [1]


def test_an_error_that_is_not_of_the_disk_ends_the_run_in_the_step_that_is_saved(
    saving_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Worker, folder: Path) -> None:
        raise RuntimeError("an unknown fault")

    monkeypatch.setattr(Worker, "begin_save", fail)
    with pytest.raises(RuntimeError, match="an unknown fault"):
        train_with(*saving_run)
    run = run_of(saving_run)
    assert run.steps == [0, 1]
    assert "storage/alerts" not in run.metrics[-1]


def test_an_interrupted_export_is_absent_and_written_on_resume(
    saving_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupt(self: Learner, folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy/config.json").write_text("{}")
        raise KeyboardInterrupt

    overrides = [*saving_run, "trainer.hf_save_interval=2"]
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "export", interrupt)
        expect_error(*overrides, status=130)
    run = run_of(overrides)
    assert not run.export(2).parent.exists()
    train(*overrides)
    assert {path.name for path in (run.folder / "export").iterdir()} == {".lock", "global_step_2"}
    assert run.weights(2)


# -- resuming


@pytest.fixture(scope="module")
def finished_run(tiny_model_path: Path, catch_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("finished")
    register_catch()
    run = train(*catch_run(folder, *SAVING, model=tiny_model_path, data=catch_data))
    skyrl_gym.envs.deregister("catch")
    return run


@pytest.fixture
def saved_run(finished_run: Run, tmp_path: Path) -> Run:
    """A copy of a finished run with checkpoints of steps 1 and 2, which the overrides `saving_run` resume."""
    return Run(shutil.copytree(finished_run.folder, tmp_path / "skyrl/test_run"))


def test_a_damaged_checkpoint_is_refused_and_the_offered_one_resumes(saved_run: Run, saving_run: list[str]) -> None:
    checkpoints = saved_run.folder / "ckpts"
    damaged = checkpoints / "global_step_2/policy/__0_0.distcp"
    flip_a_bit(damaged)
    message = expect_error(*saving_run)
    assert f"the content of {damaged} has changed since it was saved" in message
    settings = re.findall(r"trainer\.resume_\w+=\S+", message)
    assert settings == ["trainer.resume_mode=from_path", f"trainer.resume_path={checkpoints}/global_step_1"]
    train(*saving_run, *settings)
    assert find_damage(checkpoints / "global_step_2") == []


def test_a_changed_byte_in_any_file_is_named(saved_run: Run) -> None:
    assert_a_changed_byte_is_named(saved_run.folder / "ckpts/global_step_2")


class Intruder:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_a_checkpoint_runs_no_code(saved_run: Run, saving_run: list[str], tmp_path: Path) -> None:
    checkpoint = saved_run.folder / "ckpts/global_step_2"
    torch.save(Intruder(tmp_path / "intruder"), checkpoint / "driver.pt")
    (checkpoint / "checksums.json").unlink()
    write_manifest(checkpoint)
    expect_error(*saving_run)
    assert not (tmp_path / "intruder").exists()


def test_a_checkpoint_of_an_older_version_is_refused_by_name(saved_run: Run, saving_run: list[str]) -> None:
    shutil.rmtree(saved_run.folder / "ckpts/global_step_1")
    checkpoint = saved_run.folder / "ckpts/global_step_2"
    (checkpoint / "checksums.json").unlink()
    message = expect_error(*saving_run)
    assert f"cannot resume from {checkpoint}: checksums.json is missing" in message
    assert "an older version wrote it" in message
    assert "Set trainer.resume_mode=none to start over" in message
