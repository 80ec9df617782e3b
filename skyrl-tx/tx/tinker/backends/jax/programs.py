"""Compiled programs: kept for the next start, counted and logged."""

from __future__ import annotations

import contextlib
import logging
from functools import cache
from pathlib import Path

import jax
from jax import monitoring

logger = logging.getLogger(__name__)

COMPILED = "/jax/core/compile/backend_compile_duration"
WORTH_A_LINE_SEC = 0.2
MOST_BYTES = 4 << 30


class Programs:
    """Those that this process has compiled, or read from where they are kept."""

    def __init__(self) -> None:
        self.n_made = 0
        monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            self.n_made += 1
            level = logging.INFO if duration_secs > WORTH_A_LINE_SEC else logging.DEBUG
            logger.log(
                level, "program %d, %s, is ready after %.1f s", self.n_made, kwargs.get("fun_name"), duration_secs
            )


@cache
def programs() -> Programs:
    """The one of this process."""
    return Programs()


def keep_programs(folder: Path | None) -> None:
    """Keep programs there, also those that compile fast: there are many of them."""
    if folder is not None:
        make_room(folder)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def make_room(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Delete the programs of a folder that were not read for longest, until the rest has no more bytes than these.

    JAX can do so as well, but not any more once a process has died while it wrote one. Where times of reading are not
    kept, those made first go first.
    """
    files = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process deletes some, too
            files.append((path, path.stat()))
    n_bytes = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda one: one[1].st_atime):
        if n_bytes <= most_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # they are another user's
            logger.warning("programs in %s that are not used any more cannot be deleted: %s", folder, error)
            break
        n_bytes -= stat.st_size
