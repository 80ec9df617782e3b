"""A folder of checkpoints, each complete or absent.

latest_ckpt_global_step.txt     the pointer: the step to resume from
global_step_N/                  a complete checkpoint with `checksums.json`
.global_step_N.partial/         a save in progress, or left by a crash
.global_step_N.replaced/        the step's earlier checkpoint, while a new one replaces it
.global_step_N.removed.partial/ a removal in progress, or interrupted by a crash

The invariant is that a folder named global_step_N is complete. A save of step 40 keeps it, whenever the process dies:

1. Write all files and `checksums.json` into .global_step_40.partial, and sync every file and folder. After a crash, the
   partial folder is never read, and the next save removes it.
2. Rename global_step_40, if it exists, to .global_step_40.replaced. It exists if the run was resumed from step 20 and
   has reached step 40 again. After a crash, the next start renames it back.
3. Rename .global_step_40.partial to global_step_40, sync the parent folder, and remove .global_step_40.replaced. After
   a crash, step 40 is complete, but the pointer still has the previous step.
4. Replace the pointer: write the new one to another file, sync it, and rename it. Now the run resumes from step 40.
5. Remove checkpoints beyond the number to keep. Each removal starts with a rename.
"""

import asyncio
import logging
import re
import shutil
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from skyrl_report.run_folder import parse_steps
from skyrl_train.checkpoint.durable import make_folder, replace_text, sync, sync_tree
from skyrl_train.checkpoint.manifest import find_damage, write_manifest
from skyrl_train.errors import CheckpointError
from skyrl_train.types.specs import SPARE_BYTES

logger = logging.getLogger(__name__)

POINTER = "latest_ckpt_global_step.txt"

Write = Callable[[Path], Awaitable[None]]
"""Function that fills an empty folder."""


@dataclass(eq=False)
class CheckpointStore:
    """The checkpoints under `path`: save, find, verify and remove them."""

    path: Path
    max_to_keep: int = -1  # the latest ones, or with -1 as many as the disk has room for
    resume_mode: Literal["none", "latest", "from_path"] = "latest"
    resume_path: str | None = None
    pinned: set[int] = field(default_factory=set, init=False)
    """Steps that are kept, e.g. until they are uploaded, unless `save` needs their space."""
    _removing: threading.Lock = field(default_factory=threading.Lock, init=False)  # removals run in threads
    _resumed_step: int | None = field(default=None, init=False)  # kept until the next save, whatever the pointer has

    async def save(self, step: int, write: Write, expected_bytes: int = 0) -> Path:
        """Have `write` fill an empty folder, make it the checkpoint of `step`, and point to it.

        If fewer than `expected_bytes` are free, old checkpoints are removed first, but never the one to resume from.
        Files are synced and removed in a thread, so the event loop is never blocked.

        Raises:
            CheckpointError: a file could not be written, or `write` raised it. The previous checkpoint is intact.
        """

        async def write_with_manifest(folder: Path) -> None:
            await write(folder)
            await asyncio.to_thread(write_manifest, folder)

        try:
            target = await self.receive(step, write_with_manifest, expected_bytes)
        except OSError as error:
            raise CheckpointError(
                f"cannot save the checkpoint at step {step} in {self.path}: {error}. Free disk space, or move "
                f"{self.path} to a larger disk and set trainer.ckpt_path to it, then rerun the command: it "
                f"{self.describe_rerun()}"
            ) from error
        self._resumed_step = None
        try:
            await asyncio.to_thread(self.remove_superseded)
        except OSError as error:
            logger.warning("Saved the checkpoint at step %d, but failed to remove an old one: %s", step, error)
        return target

    async def receive(self, step: int, write: Write, expected_bytes: int) -> Path:
        """Have `write` copy a checkpoint with its checksums into an empty folder, and point to it."""
        await asyncio.to_thread(self._make_room, expected_bytes)
        target = await write_complete(self._folder(step), write)
        await asyncio.to_thread(replace_text, self.path / POINTER, f"{step}\n")
        return target

    def find(self, downloaded: Path | None = None) -> Path | None:
        """Return the checkpoint that `trainer.resume_mode` selects, or None to start from the beginning.

        `downloaded` is the local copy of a `trainer.resume_path` in remote storage.

        Raises:
            CheckpointError: the checkpoint or the pointer's step does not exist, or the folder's name has no step.
        """
        if self.resume_mode == "latest":
            return self.latest()
        if self.resume_mode == "none":
            return None
        folder = downloaded or Path(self.resume_path or "")
        if not re.fullmatch(r"global_step_\d+", folder.name):
            raise CheckpointError(f"trainer.resume_path={folder} must end in global_step_N, e.g. ckpts/global_step_40")
        if not folder.is_dir():
            raise CheckpointError(f"trainer.resume_path={folder} does not exist")
        if folder.parent.resolve() == self.path.resolve():
            self._resumed_step = step_of(folder)
        return folder

    async def verify(self, folder: Path) -> None:
        """Raise CheckpointError if a file of a checkpoint is missing or does not match its checksum.

        The message names the file and the latest intact checkpoint.
        """
        if damage := await asyncio.to_thread(find_damage, folder):
            folders = (self._folder(step) for step in reversed(self.steps()))
            intact = await asyncio.to_thread(lambda: next((one for one in folders if not find_damage(one)), None))
            raise CheckpointError(
                f"cannot resume from {folder}: {', '.join(damage)}. {describe_fix(intact, self.path)}"
            )

    def latest(self) -> Path | None:
        """Finish interrupted replacements. Return the pointer's checkpoint, if any; CheckpointError if it is gone."""
        self._restore_replaced()
        step = self._pointed_step()
        if step is None:
            return None
        folder = self._folder(step)
        if not folder.is_dir():
            complete = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.path / POINTER} contains step {step}, but {folder} does not exist (complete steps: "
                f"{complete}); write one of them into the file, or set trainer.resume_mode=none"
            )
        return folder

    def resumable_step(self) -> int | None:
        """Return the step of the checkpoint to resume from, if any."""
        pointed = self._pointed_step()
        if pointed is None or not pointed.isdecimal():
            return None
        names = (f"global_step_{pointed}", f".global_step_{pointed}.replaced")
        return int(pointed) if any((self.path / name).is_dir() for name in names) else None

    def describe_rerun(self) -> str:
        """Return a verb phrase for what the same command would do next, e.g. "resumes from step 40"."""
        step = self.resumable_step()
        latest = "" if step is None else f"; with trainer.resume_mode=latest, it resumes from step {step}"
        if self.resume_mode == "from_path":
            return f"resumes from trainer.resume_path={self.resume_path} again{latest}"
        if step is None:
            return "starts again, because there is no checkpoint"
        if self.resume_mode == "none":
            return f"starts again, because trainer.resume_mode=none{latest}"
        return f"resumes from step {step}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        return parse_steps(entry.name for entry in self.path.glob("global_step_*"))

    def check_space(self, checkpoint_bytes: int) -> None:
        """Raise CheckpointError if `find_shortage` finds that the disk cannot hold one more checkpoint."""
        self._tidy_up()
        if shortage := self.find_shortage(checkpoint_bytes):
            raise CheckpointError(shortage)

    def find_shortage(self, checkpoint_bytes: int) -> str | None:
        """Return why the disk cannot hold the last complete checkpoint and a new one, or None if it can.

        Checkpoints that `save` would remove count as free space. The folder need not exist, and nothing is changed.
        """
        needed = checkpoint_bytes * (1 if self.steps() else 2) + SPARE_BYTES
        files = (path for step in self._removable() for path in self._folder(step).rglob("*") if path.is_file())
        disk = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(disk).free + sum(path.stat().st_size for path in files)
        if free >= needed:
            return None
        return (
            f"{self.path} has {free:,} bytes free or in removable checkpoints but needs {needed:,}: a checkpoint takes "
            f"{checkpoint_bytes:,}, the next one is written before the last is removed, and {SPARE_BYTES:,} must stay "
            "free; set trainer.ckpt_path to a larger disk, or trainer.ckpt_interval=-1 to run without checkpoints"
        )

    def remove_superseded(self) -> None:
        """Finish interrupted removals. Remove surplus checkpoints, but neither pinned ones nor those to resume from."""
        with self._removing:
            for removed in self.path.glob(".global_step_*.removed.partial"):
                shutil.rmtree(removed)
            pointed = self.resumable_step()
            if pointed is None or self.max_to_keep <= 0:
                return
            n_excess = max(0, len(self.steps()) - self.max_to_keep)
            for step in self._other_steps(pointed)[:n_excess]:
                if step not in self.pinned and step != self._resumed_step:
                    self._remove(step)

    def _folder(self, step: int | str) -> Path:
        return self.path / f"global_step_{step}"

    def _other_steps(self, pointed: int) -> list[int]:
        """Return all steps but `pointed` in the order of removal: later steps, then earlier ones, each ascending.

        With steps 10, 20, 40 and `pointed` 20, that is 40, 10: the run saved 40 before it resumed from an earlier step.
        """
        return sorted((step for step in self.steps() if step != pointed), key=lambda step: (step < pointed, step))

    def _removable(self) -> list[int]:
        """Return the steps that may be removed for room, pinned steps last.

        The steps to resume from are never among them. While the pointer's step is missing, no step is removed.
        """
        pointed = self.resumable_step()
        others = [] if pointed is None else [step for step in self._other_steps(pointed) if step != self._resumed_step]
        return sorted(others, key=lambda step: step in self.pinned)

    def _pointed_step(self) -> str | None:
        """Return the pointer's text, or the latest step if there was a crash before the first pointer."""
        pointer, steps = self.path / POINTER, self.steps()
        if pointer.exists():
            return pointer.read_text(encoding="utf-8", errors="replace").strip()
        return str(steps[-1]) if steps else None

    def _make_room(self, expected_bytes: int) -> None:
        with self._removing:
            self._tidy_up()
            for step in self._removable():
                if shutil.disk_usage(self.path).free >= expected_bytes + SPARE_BYTES:
                    return
                logger.warning("The disk is short: removing the checkpoint at step %d before saving the next", step)
                self._remove(step)

    def _remove(self, step: int) -> None:
        doomed = self.path / f".global_step_{step}.removed.partial"
        self._folder(step).rename(doomed)  # a crash must not leave a truncated checkpoint under a complete one's name
        shutil.rmtree(doomed)

    def _tidy_up(self) -> None:
        """Restore or remove folders that a crash left behind."""
        make_folder(self.path)
        self._restore_replaced()
        for leftover in [*self.path.glob(".global_step_*.partial"), *self.path.glob(".global_step_*.replaced")]:
            shutil.rmtree(leftover)

    def _restore_replaced(self) -> None:
        """Rename an earlier checkpoint back if a crash came between the two renames of a replacement."""
        for replaced in self.path.glob(".global_step_*.replaced"):
            target = self.path / replaced.name.removeprefix(".").removesuffix(".replaced")
            if not target.exists():
                replaced.rename(target)


def describe_fix(intact: Path | str | None, checkpoints: Path | str) -> str:
    """Return how to resume after a damaged checkpoint: from the latest intact one in `checkpoints`, if there is one."""
    if intact is None:
        return f"No other checkpoint in {checkpoints} is intact. Set trainer.resume_mode=none to start over"
    return (
        f"The latest intact checkpoint is {intact}. Set trainer.resume_mode=from_path and "
        f"trainer.resume_path={intact} to resume from it"
    )


def step_of(checkpoint: Path) -> int:
    """Return N for a folder named `global_step_N`."""
    return int(checkpoint.name.removeprefix("global_step_"))


async def write_complete(target: Path, write: Write) -> Path:
    """Have `write` fill a folder, sync its files, and rename it to `target`. An existing `target` is replaced.

    After a crash, `target` is complete or absent.
    """
    partial = target.with_name(f".{target.name}.partial")
    await asyncio.to_thread(_make_empty, partial)
    try:
        await write(partial)
        await asyncio.to_thread(_commit, partial, target)
    except Exception:
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)  # a full disk may be what failed
        raise
    return target


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    make_folder(folder.parent)
    folder.mkdir()


def _commit(partial: Path, target: Path) -> None:
    sync_tree(partial)
    replaced = target.with_name(f".{target.name}.replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if target.exists():  # the run was resumed from an earlier step and has reached this step again
        target.rename(replaced)
    partial.rename(target)
    sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)
