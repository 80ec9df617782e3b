"""Compiled programs: cached on disk, counted and logged."""

import contextlib
import logging
import sys
from functools import cache
from pathlib import Path

import jax
from jax import monitoring

logger = logging.getLogger(__name__)

LOWERED, COMPILED = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
"""JAX events directly before and after a program's compilation. They occur even if their part fails."""
MIN_LOGGED_SEC = 0.2
MAX_BYTES = 4 << 30


class Programs:
    """Programs that this process has compiled or loaded from the cache."""

    def __init__(self) -> None:
        self.n_compiled = 0
        self.is_compiling = False
        monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == LOWERED:
            self.is_compiling = sys.exception() is None  # a program that cannot be lowered is not compiled
        if event == COMPILED:
            self.is_compiling = False
            self.n_compiled += 1
            level = logging.INFO if duration_secs > MIN_LOGGED_SEC else logging.DEBUG
            logger.log(
                level, "program %d, %s, is ready after %.1f s", self.n_compiled, kwargs.get("fun_name"), duration_secs
            )


@cache
def programs() -> Programs:
    """Return the counter of this process."""
    return Programs()


def cache_programs(folder: Path | None) -> None:
    """Cache programs in a folder, including programs that compile fast, because there are many of them."""
    if folder is not None:
        evict_programs(folder)
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def evict_programs(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Delete the least recently read programs in a folder, until the rest fits into `max_bytes`.

    JAX can also do this, but not after a process died while writing a program. On file systems without access times,
    the oldest programs are deleted.
    """
    files = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete files too
            files.append((path, path.stat()))
    n_bytes = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda file: file[1].st_atime):
        if n_bytes <= max_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # they may belong to a different user
            logger.warning("failed to delete unused programs in %s: %s", folder, error)
            break
        n_bytes -= stat.st_size
