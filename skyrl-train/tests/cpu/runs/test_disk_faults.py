"""A disk that fails for a while in the middle of a run costs checkpoints of that time, and nothing else."""

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train_kit.runs import train_with

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.manifest import find_damage

FIRST_STEP, LAST_STEP = 2, 5

nightly = pytest.mark.nightly


class Fault(Callback):
    """A fault of the disk at `disk` from the end of step 2 to the end of step 5.

    It is the last callback of a run, and records what the run saves and reports.
    """

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self.is_present = False
        self.saved: list[int] = []
        self.alerts: list[str] = []

    def begin(self) -> None: ...

    def end(self) -> None: ...

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.global_step == FIRST_STEP:
            self.is_present = True
            self.begin()
        elif report.global_step == LAST_STEP:
            self._end()

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        self._end()

    def _end(self) -> None:
        if self.is_present:
            self.is_present = False
            self.end()

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        self.saved.append(int(path.name.removeprefix("global_step_")))

    async def on_alert(self, run: Run, text: str) -> None:
        self.alerts.append(text)


class Vanished(Fault):
    """The folder is removed while a checkpoint is written into it."""

    def begin(self) -> None:
        shutil.rmtree(self.disk / "ckpts", ignore_errors=True)


class Patched(Fault):
    """A fault of an operating-system call on files below the folder."""

    name = "fsync"

    def fail(self) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        self.call: Callable[..., Any] = getattr(os, self.name)

        def failing(target: int | str | Path, *args: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
            if path.startswith(str(self.disk)):
                self.fail()
            return self.call(target, *args)

        setattr(os, self.name, failing)

    def end(self) -> None:
        setattr(os, self.name, self.call)


class Flaky(Patched):
    """A fifth of the calls fail, among them the first."""

    generator = random.Random(1)

    def fail(self) -> None:
        if self.generator.random() < 0.2:
            raise OSError(errno.EIO, "Input/output error")


class Stalled(Patched):
    """Every call waits for the end of the fault, in the middle of a checkpoint."""

    def __init__(self, disk: Path) -> None:
        super().__init__(disk)
        self.is_over = threading.Event()

    def fail(self) -> None:
        assert self.is_over.wait(200), "training waits for the disk"

    def end(self) -> None:
        super().end()
        self.is_over.set()


class StalledFolder(Stalled):
    """New folders wait, so that no checkpoint begins."""

    name = "mkdir"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def run_six_steps(fault: Fault, catch_run: list[str]) -> Fault:
    """Train six steps with a checkpoint after each on the faulty disk."""
    settings = ["trainer.epochs=3", "trainer.eval_interval=-1", "trainer.ckpt_interval=1"]
    settings += [f"trainer.ckpt_path={fault.disk}/ckpts", "trainer.ckpt_timeout_seconds=1"]
    run = train_with(*catch_run, *settings, last=[fault])
    assert run.steps == [0, 1, 2, 3, 4, 5, 6], "training continues"
    store = CheckpointStore(fault.disk / "ckpts")
    assert store.latest() == store.path / "global_step_6"
    assert [damage for step in store.steps() for damage in find_damage(store.path / f"global_step_{step}")] == []
    assert list(store.path.glob(".global_step_*")) == []
    assert {1, 6} <= set(fault.saved)
    return fault


@nightly  # test_full_disk has a full disk without a mount
def test_calls_that_fail_cost_only_the_checkpoints_of_that_time(catch_run: list[str], disk: Path) -> None:
    fault = run_six_steps(Flaky(disk), catch_run)
    failures = [alert for alert in fault.alerts if "cannot save the checkpoint at step" in alert]
    assert failures
    assert all("Input/output error" in alert for alert in failures)
    assert len(fault.saved) + len(failures) == 6, "each step is saved or reported"


def test_a_folder_that_is_removed_during_a_save_is_created_again(catch_run: list[str], disk: Path) -> None:
    run_six_steps(Vanished(disk), catch_run)


@pytest.mark.parametrize("kind", [Stalled, pytest.param(StalledFolder, marks=nightly)])
def test_training_waits_for_a_stalled_call_only_as_long_as_configured(
    kind: type[Fault], catch_run: list[str], disk: Path
) -> None:
    """The disk recovers only after step 5. A run that waits for the disk never gets there."""
    fault = run_six_steps(kind(disk), catch_run)
    slow = [alert for alert in fault.alerts if "longer than trainer.ckpt_timeout_seconds=1" in alert]
    assert len(slow) == 1, "one alert for a stall"
    assert not {4, 5} & set(fault.saved)
