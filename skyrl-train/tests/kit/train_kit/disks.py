"""Disks that fail while a run saves checkpoints on them, from the end of step 2 to the end of step 5.

Some faults need a disk that `python -m train_kit.disks FAULT FOLDER OVERRIDES…` mounts on the folder, in a mount
namespace of its own. It prints the outcome as JSON.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from examples.catch.main_catch import register_catch
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.checkpoint import CheckpointStore
from skyrl_train.checkpoint.manifest import find_damage
from train_kit.runs import train_with

DISK_BYTES = 160 * 2**20  # two checkpoints, and what a store leaves free
IMAGE_BYTES = 192 * 2**20  # of a file system with a journal
FIRST_STEP, LAST_STEP = 2, 5


def call(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True)


class Fault:
    """A fault of the disk at `disk`."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk

    def begin(self) -> None: ...

    def end(self) -> None: ...


class MountedFault(Fault):
    """A fault that needs a disk of its own."""

    def mount(self) -> None:
        call("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk)


class Full(MountedFault):
    def begin(self) -> None:
        with suppress(OSError), open(self.disk / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))

    def end(self) -> None:
        (self.disk / "ballast").unlink()


class ReadOnly(MountedFault):
    """A read-only view of the folder hides it. Files that are open, such as the lock, stay writable."""

    def begin(self) -> None:
        folder, view = self.disk / "ckpts", self.disk.with_suffix(".view")
        view.mkdir()
        call("mount", "--bind", folder, view)
        call("mount", "-o", "remount,bind,ro", view)  # the folder itself is busy
        call("mount", "--bind", view, folder)

    def end(self) -> None:
        call("umount", "--lazy", self.disk / "ckpts")


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

    def __init__(self, disk: Path) -> None:
        super().__init__(disk)
        self._generator = random.Random(1)

    def fail(self) -> None:
        if self._generator.random() < 0.2:
            raise OSError(errno.EIO, "Input/output error")


class Stalled(Patched):
    """Every call waits for the end of the fault, in the middle of a checkpoint."""

    def __init__(self, disk: Path) -> None:
        super().__init__(disk)
        self.is_over = threading.Event()

    def fail(self) -> None:
        assert self.is_over.wait(100), "training waits for the disk"

    def end(self) -> None:
        super().end()
        self.is_over.set()


class StalledFolder(Stalled):
    """New folders wait, so that no checkpoint begins."""

    name = "mkdir"


class Frozen(MountedFault):
    """The kernel lets every write wait. Needs root."""

    def mount(self) -> None:
        image = self.disk.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        call("mkfs.ext4", "-q", image)
        call("mount", "-o", "loop", image, self.disk)

    def begin(self) -> None:
        call("fsfreeze", "--freeze", self.disk)

    def end(self) -> None:
        call("fsfreeze", "--unfreeze", self.disk)


FAULTS: dict[str, type[Fault]] = {
    "full": Full,
    "read_only": ReadOnly,
    "vanished": Vanished,
    "flaky": Flaky,
    "stalled": Stalled,
    "stalled_folder": StalledFolder,
    "frozen": Frozen,
}


@dataclass(frozen=True)
class Outcome:
    """What a run with a fault saved and reported."""

    saved: list[int]
    alerts: list[str]
    steps: list[int]
    latest: str | None
    damage: list[str]
    partial: list[str]
    """Folders of incomplete checkpoints."""


class Recorder(Callback):
    """A callback after all others, which begins and ends the fault, and records what happens."""

    def __init__(self, fault: Fault) -> None:
        self._fault: Fault | None = None
        self._coming = fault
        self.saved: list[int] = []
        self.alerts: list[str] = []
        self.steps: list[int] = []

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        self.steps.append(report.global_step)
        if report.global_step == FIRST_STEP:
            self._fault = self._coming
            self._fault.begin()
        elif report.global_step == LAST_STEP:
            self._end()

    def _end(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            fault.end()

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        self.saved.append(int(path.name.removeprefix("global_step_")))

    async def on_alert(self, run: Run, text: str) -> None:
        self.alerts.append(text)

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        self._end()


def run_with_fault(fault: Fault, overrides: Sequence[str]) -> Outcome:
    """Train with a checkpoint after each step on the faulty disk."""
    recorder = Recorder(fault)
    train_with(*overrides, f"trainer.ckpt_path={fault.disk}/ckpts", "trainer.ckpt_interval=1", last=[recorder])
    store = CheckpointStore(fault.disk / "ckpts")
    latest = store.latest()
    return Outcome(
        recorder.saved,
        recorder.alerts,
        recorder.steps,
        latest and latest.name,
        [damage for step in store.steps() for damage in find_damage(store.path / f"global_step_{step}")],
        sorted(path.name for path in store.path.glob(".global_step_*")),
    )


def main(name: str, folder: str, *overrides: str) -> None:
    register_catch()
    fault = FAULTS[name](Path(folder))
    assert isinstance(fault, MountedFault)
    fault.mount()
    sys.stdout.write(json.dumps(asdict(run_with_fault(fault, overrides))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
