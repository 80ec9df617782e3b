"""Durability of runs: diverged weights, an interrupted export, a second process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.checkpoint import CheckpointStore, folder_lock
from skyrl_train.entrypoints.main_base import BasePPOExp, main, parse_cli
from skyrl_train.errors import ConfigError
from skyrl_train.learner import Learner
from skyrl_train.trainer import Trainer


@pytest.fixture
def train(catch_run: list[str], tmp_path: Path) -> Callable[..., Path]:
    """Run two steps of Catch with a checkpoint after each, and return the run folder."""

    def run(*overrides: str) -> Path:
        main([*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1", *overrides])
        return tmp_path / "skyrl/test_run"

    return run


def pointed_step(folder: Path) -> int:
    return int((folder / "ckpts/latest_ckpt_global_step.txt").read_text())


def test_a_diverged_policy_does_not_replace_a_finite_checkpoint(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rollout of step 2 fails; saving it would delete the only checkpoint, that of step 1."""
    sync = Trainer.sync_weights

    async def diverge(self: Trainer, step: object) -> None:
        await sync(self, step)  # type: ignore[arg-type]
        if step.number == 1:  # type: ignore[attr-defined]
            self.global_step = 1
            await self.save_checkpoint()
            (rank,) = self.learner.policy._ranks
            with torch.no_grad():
                for parameter in rank.worker.module.parameters():  # type: ignore[attr-defined]
                    parameter.fill_(torch.nan)

    monkeypatch.setattr(Trainer, "sync_weights", diverge)
    with pytest.raises(SystemExit):
        train("trainer.max_ckpts_to_keep=1", "trainer.ckpt_interval=100")
    folder = tmp_path / "skyrl/test_run"
    assert "logits are not finite" in capsys.readouterr().err
    assert "Step 1 is not saved: " in (folder / "train.log").read_text()
    assert pointed_step(folder) == 1
    monkeypatch.setattr(Trainer, "sync_weights", sync)
    assert pointed_step(train("trainer.ckpt_interval=100")) == 2, "the run resumes from the finite checkpoint"


def test_an_interrupted_export_is_absent_and_written_on_resume(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Learner.export

    async def killed(self: Learner, folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy/config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "export", killed)
    with pytest.raises(SystemExit):
        train("trainer.hf_save_interval=2")
    folder = tmp_path / "skyrl/test_run"
    assert not (folder / "export/global_step_2").exists()
    monkeypatch.setattr(Learner, "export", export)
    train("trainer.hf_save_interval=2")
    assert {path.name for path in (folder / "export").iterdir()} == {"global_step_2"}
    assert (folder / "export/global_step_2/policy/model.safetensors").stat().st_size > 10_000


def test_a_second_process_on_a_run_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from skyrl_train.checkpoint import folder_lock\n"
        "with folder_lock(Path(sys.argv[1]), ''): print('held', flush=True); time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        holder = rf"{tmp_path} is in use by process {first.pid} on \S+; wait for it"
        with pytest.raises(ConfigError, match=holder), folder_lock(tmp_path, "wait for it"):
            pytest.fail("two processes hold the lock of one folder")
    finally:
        first.kill()
        first.wait()
    with folder_lock(tmp_path, "wait for it"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] != first.pid, "a crash releases the lock"


def test_a_run_locks_its_folder_while_it_trains(catch_run: list[str], tmp_path: Path) -> None:
    error_messages: list[str] = []

    class StartSecondRun(Callback):
        async def on_step_end(self, run: Run, report: object) -> None:
            script = "from skyrl_train.entrypoints.main_base import main; main()"
            command = [sys.executable, "-c", script, *catch_run]
            error_messages.append(
                (await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)).stderr
            )
            run.request_stop("the test is done")

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [StartSecondRun()]

    with pytest.raises(KeyboardInterrupt):
        Experiment(parse_cli(catch_run)).run()
    assert "is in use by process" in error_messages[0]
    assert "give this run another trainer.run_name" in error_messages[0]


def test_a_stop_requested_after_the_checkpoint_of_a_step_saves_the_step(catch_run: list[str], tmp_path: Path) -> None:
    class StopLast(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            if report.global_step == 1:
                run.request_stop("after the callback that saves")

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [*super().get_callbacks(*parts), StopLast()]  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        Experiment(parse_cli([*catch_run, "trainer.ckpt_interval=10", "trainer.eval_interval=-1"])).run()
    assert pointed_step(tmp_path / "skyrl/test_run") == 1


async def test_saving_does_not_block_the_event_loop_and_callbacks_follow_the_pointer(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file sync waits until the event loop has run, so a blocked loop would never finish the save."""
    save, steps = CheckpointStore.save, list[int]()

    async def watched_save(self: CheckpointStore, *arguments: object) -> Path:
        loop, loop_ran = asyncio.get_running_loop(), list[bool]()

        def wait_for_the_loop(descriptor: int) -> None:
            ran = threading.Event()
            loop.call_soon_threadsafe(ran.set)
            loop_ran.append(ran.wait(20))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", wait_for_the_loop)
            path = await save(self, *arguments)  # type: ignore[arg-type]
        assert len(loop_ran) > 5
        assert all(loop_ran)
        return path

    class StepRecorder(Callback):
        async def on_checkpoint(self, run: Run, path: Path) -> None:
            pointer = path.parent / "latest_ckpt_global_step.txt"
            assert path.name == f"global_step_{int(pointer.read_text())}"
            steps.append(run.global_step)

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [*super().get_callbacks(*parts), StepRecorder()]  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "save", watched_save)
    overrides = [*catch_run, "trainer.ckpt_interval=2", "trainer.eval_interval=-1"]
    await asyncio.to_thread(Experiment(parse_cli(overrides)).run)
    assert steps == [2]


def test_a_checkpoint_of_an_older_version_is_refused_by_name(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("trainer.max_training_steps=1") / "ckpts/global_step_1"
    (folder / "driver.pt").rename(folder / "trainer_state.pt")
    with pytest.raises(SystemExit):
        train()
    message = capsys.readouterr().err
    assert f"cannot resume from {folder}" in message
    assert "finish the run with that version" in message
