"""A folder of checkpoints, each complete or absent.

latest_ckpt_global_step.txt     the step to resume from, written last
global_step_N/                  appears by renaming when everything in it is on disk
.global_step_N.partial/         being written, or left by a crash: never read, removed by the next save
.global_step_N.replaced/        the step's earlier checkpoint, for the instant in which a new one takes its place
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from skyrl_train.errors import CheckpointError

logger = logging.getLogger(__name__)

POINTER = "latest_ckpt_global_step.txt"
SPARE_BYTES = 64 * 2**20  # left free beyond what a checkpoint needs: logs and metrics go on


Write = Callable[[Path], Awaitable[None]]
"""Fills an empty folder."""


class CheckpointStore:
    """Saves, finds and removes the checkpoints under `path`."""

    def __init__(self, path: Path, max_to_keep: int = -1) -> None:
        """Keep the newest `max_to_keep` checkpoints; -1 keeps all that the disk has room for."""
        self.path = path
        self._max_to_keep = max_to_keep

    async def save(self, step: int, write: Write, expected_bytes: int = 0) -> Path:
        """Let `write` fill an empty folder, then make it the checkpoint of `step` and the one to resume from.

        When fewer than `expected_bytes` are free, old checkpoints are removed first, but never the one to resume from.
        Files are synced and removed in a thread, so that the event loop is never blocked.

        Raises:
            CheckpointError: the disk refused, or `write` raised it; the one to resume from is what it was.
        """
        try:
            await asyncio.to_thread(self._prepare, expected_bytes)
            target = await write_complete(self.path / f"global_step_{step}", write)
            await asyncio.to_thread(self._point_to, step)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot save the checkpoint of step {step} in {self.path}: {error}; the one before it is intact. "
                "Make room or set trainer.ckpt_path to another disk, and start the run again to resume"
            ) from error
        try:
            await asyncio.to_thread(self._remove_superseded, step)
        except OSError as error:
            logger.warning("The checkpoint of step %d is saved; an old one could not be removed: %s", step, error)
        return target

    def _prepare(self, expected_bytes: int) -> None:
        self._tidy_up()
        self._make_room(expected_bytes)

    def _remove_superseded(self, step: int) -> None:
        self._remove_leftovers()
        if self._max_to_keep > 0:
            self._remove(self.removable(step)[: max(0, len(self.steps()) - self._max_to_keep)])

    def find(self, mode: Literal["none", "latest", "from_path"], path: str | None = None) -> Path | None:
        """The checkpoint that `trainer.resume_mode` asks for; None to start anew.

        Raises:
            CheckpointError: it is not there, or its name does not say its step.
        """
        if mode == "none":
            return None
        if mode == "latest":
            return self.latest()
        folder = Path(path or "")
        step_of(folder)
        return folder

    def latest(self) -> Path | None:
        """The checkpoint to resume from, or None when there is none.

        Raises:
            CheckpointError: the pointer names a checkpoint that is not there.
        """
        self._restore_replaced()
        step = self._pointed_step()
        if step is None:
            return None
        folder = self.path / f"global_step_{step}"
        if not folder.is_dir():
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.path / POINTER} says step {step}, but {folder} does not exist (complete steps: {there}); "
                "write one of them into the file, or set trainer.resume_mode=none"
            )
        return folder

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        names = (re.fullmatch(r"global_step_(\d+)", entry.name) for entry in self.path.glob("global_step_*"))
        return sorted(int(name[1]) for name in names if name)

    def removable(self, newest: int) -> list[int]:
        """All steps but the newest, the least useful first: those of an abandoned future, then the oldest."""
        return sorted((step for step in self.steps() if step != newest), key=lambda step: (step < newest, step))

    def check_space(self, checkpoint_bytes: int) -> None:
        """Before the first step: there must be room for a checkpoint beside the last complete one.

        What `save` would remove to make room counts as free.

        Raises:
            CheckpointError: with what is needed and what is free.
        """
        self._tidy_up()
        needed = checkpoint_bytes * (1 if self.steps() else 2) + SPARE_BYTES
        old = sum(_size(self.path / f"global_step_{step}") for step in self._removable_now())
        free = shutil.disk_usage(self.path).free + old
        if free < needed:
            raise CheckpointError(
                f"{self.path} has {free:,} bytes free and needs {needed:,}: a checkpoint takes {checkpoint_bytes:,}, "
                "and the next one is written before the last one goes; set trainer.ckpt_path to a larger disk, or "
                "trainer.ckpt_interval=-1 to run without checkpoints"
            )

    def _removable_now(self) -> list[int]:
        """All steps but the one to resume from; none while the pointer names a checkpoint that is not there."""
        pointed = self._pointed_step()
        return next((self.removable(step) for step in self.steps() if str(step) == pointed), [])

    def _pointed_step(self) -> str | None:
        """What the pointer says; the newest step where a crash came before the first pointer; None without either."""
        pointer, steps = self.path / POINTER, self.steps()
        if pointer.exists():
            return pointer.read_text().strip()
        return str(steps[-1]) if steps else None

    def _make_room(self, expected_bytes: int) -> None:
        for step in self._removable_now():
            if shutil.disk_usage(self.path).free >= expected_bytes + SPARE_BYTES:
                return
            logger.warning("The disk is short: removing the checkpoint of step %d before saving the next", step)
            self._remove([step])

    def _remove(self, steps: list[int]) -> None:
        for step in steps:
            doomed = self.path / f".global_step_{step}.removed.partial"
            (self.path / f"global_step_{step}").rename(doomed)  # never half a checkpoint under its own name
            shutil.rmtree(doomed)

    def _tidy_up(self) -> None:
        """What a crash left is finished or removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._restore_replaced()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for leftover in [*self.path.glob(".global_step_*.partial"), *self.path.glob(".global_step_*.replaced")]:
            shutil.rmtree(leftover)

    def _restore_replaced(self) -> None:
        """After a crash in the instant between the two renames, the earlier checkpoint gets its name back."""
        for replaced in self.path.glob(".global_step_*.replaced"):
            target = self.path / replaced.name.removeprefix(".").removesuffix(".replaced")
            if not target.exists():
                replaced.rename(target)

    def _point_to(self, step: int) -> None:
        partial = self.path / f".{POINTER}.partial"
        partial.write_text(f"{step}\n")
        _sync(partial)
        partial.replace(self.path / POINTER)
        _sync(self.path)


async def write_complete(target: Path, write: Write) -> Path:
    """Let `write` fill a folder that gets the name `target` when all of it is on disk: complete or absent.

    A folder that has the name already is replaced.
    """
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        await asyncio.to_thread(shutil.rmtree, partial)
    partial.mkdir(parents=True)
    await write(partial)
    await asyncio.to_thread(_give_name, partial, target)
    return target


def _give_name(partial: Path, target: Path) -> None:
    _sync_tree(partial)
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if target.exists():  # a run that was resumed from an earlier step comes by again
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name; CheckpointError if it is not `global_step_N` or does not exist."""
    match = re.fullmatch(r"global_step_(\d+)", folder.name)
    if not match:
        raise CheckpointError(f"trainer.resume_path={folder} must end in global_step_N, e.g. ckpts/global_step_40")
    if not folder.is_dir():
        raise CheckpointError(f"trainer.resume_path={folder} does not exist")
    return int(match[1])


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
