"""Frozen weights to sample from, by the names that clients use. Folders hold all, memory only the recently used."""

import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from tx.tinker.backends.base import Sampler, Weights
from tx.tinker.config import TxConfig
from tx.tinker.store.checkpoint_files import checkpoint_folder, snapshot_folder
from tx.tinker.types import UserError
from tx.tinker.wire.sample_job import SampleWeights

MAX_IN_MEMORY, MAX_BYTES = 64, 4 << 30
"""Limits on weights in memory: their number, and their bytes on disk."""
TOUCH_INTERVAL_SEC = 60.0


@dataclass(frozen=True, slots=True)
class _CachedWeights:
    """Weights in memory."""

    stamp: int  # of the folder. It changes with the weights.
    n_bytes: int
    weights: Weights


class Samplers:
    """The frozen weights of the engine."""

    def __init__(self, config: TxConfig, sampler: Sampler) -> None:
        self._config = config
        self._sampler = sampler
        self._in_memory: OrderedDict[Path, _CachedWeights] = OrderedDict()

    def add(self, sampling_session_id: str, weights: Weights) -> None:
        """Add weights whose snapshot was just written. This saves reading it."""
        self._cache(snapshot_folder(self._config, sampling_session_id), 0, weights)

    def find(self, weights: SampleWeights) -> Weights:
        """Return the weights that a request names.

        Raises:
            UserError: they were deleted.
        """
        if weights.snapshot is not None:
            folder, stamp = snapshot_folder(self._config, weights.snapshot), 0
            if not folder.is_dir():
                raise UserError(
                    f"there are no weights {weights.snapshot}; unnamed weights are deleted after "
                    f"{self._config.snapshot_retention_sec:g} s without use, so save them under a name"
                )
            if abs(time.time() - folder.stat().st_mtime) > TOUCH_INTERVAL_SEC:  # the clock may have been set back
                os.utime(folder)  # marks it as used
        elif weights.model_path is None:
            return self._sampler.base_weights()
        else:
            folder = checkpoint_folder(self._config, weights.model_path)
            if not folder.is_dir():
                raise UserError(f"there are no weights {weights.model_path}; they were deleted")
            stamp = folder.stat().st_mtime_ns  # it may have been overwritten
        known = self._in_memory.get(folder)
        if known is not None and known.stamp == stamp:
            self._in_memory.move_to_end(folder)
            return known.weights
        loaded = self._sampler.load_weights(folder)
        self._cache(folder, stamp, loaded)
        return loaded

    def evict_deleted(self) -> None:
        """Evict weights whose folders are gone, because they were deleted or their sessions ended."""
        for folder in [folder for folder in self._in_memory if not folder.is_dir()]:
            del self._in_memory[folder]

    def _cache(self, folder: Path, stamp: int, weights: Weights) -> None:
        """Cache weights, and evict the least recently used beyond the limits. The latest always stay."""
        n_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._in_memory[folder] = _CachedWeights(stamp, n_bytes, weights)
        self._in_memory.move_to_end(folder)
        total = sum(known.n_bytes for known in self._in_memory.values())
        while len(self._in_memory) > 1 and (total > MAX_BYTES or len(self._in_memory) > MAX_IN_MEMORY):
            _, evicted = self._in_memory.popitem(last=False)
            total -= evicted.n_bytes
