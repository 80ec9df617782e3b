"""Weights to sample from, by what clients call them. They are in folders, and those used last in memory."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tx.tinker.backends.base import Backend, Sampler, Weights
from tx.tinker.checkpoint_files import checkpoint_folder, snapshot_folder, write_folder
from tx.tinker.config import TxConfig
from tx.tinker.types import UserError
from tx.tinker.wire.sample_job import SampleWeights

MOST_IN_MEMORY, MOST_BYTES = 64, 4 << 30
"""Weights, and their size, as they are on the disk."""
SECONDS_BETWEEN_TOUCHES = 60.0


@dataclass(frozen=True, slots=True)
class _Known:
    """Weights in memory."""

    stamp: int  # of the folder that they are in; another one has other weights
    n_bytes: int
    weights: Weights


class Samplers:
    """Frozen weights."""

    def __init__(self, config: TxConfig, backend: Backend, sampler: Sampler) -> None:
        self._config = config
        self._backend = backend
        self._sampler = sampler
        self._in_memory: OrderedDict[Path, _Known] = OrderedDict()

    def keep(self, sampling_session_id: str, model_id: str) -> None:
        """A model's weights as they are now are those of a sampling session from now on."""
        folder = snapshot_folder(self._config, sampling_session_id)
        write_folder(folder, partial(self._backend.save_weights, model_id))
        self._remember(folder, 0, self._sampler.weights_of(model_id))

    def find(self, told: SampleWeights) -> Weights:
        """The weights that a client means.

        Raises:
            UserError: they are gone.
        """
        if told.snapshot is not None:
            return self._find_snapshot(told.snapshot)
        if told.model_path is None:
            return self._sampler.base_weights()
        folder = checkpoint_folder(self._config, told.model_path)
        if not folder.is_dir():
            raise UserError(f"there are no weights {told.model_path}; they were deleted")
        return self._read(folder, folder.stat().st_mtime_ns)  # a checkpoint may have been overwritten

    def _find_snapshot(self, sampling_session_id: str) -> Weights:
        folder = snapshot_folder(self._config, sampling_session_id)
        if not folder.is_dir():
            raise UserError(
                f"there are no weights {sampling_session_id}; those without a name are deleted when they were not used "
                f"for {self._config.retention_sec:g} s, so save them under a name"
            )
        if time.time() - folder.stat().st_mtime > SECONDS_BETWEEN_TOUCHES:
            os.utime(folder)  # it is used
        return self._read(folder, 0)

    def _read(self, folder: Path, stamp: int) -> Weights:
        known = self._in_memory.get(folder)
        if known is not None and known.stamp == stamp:
            self._in_memory.move_to_end(folder)
            return known.weights
        weights = self._sampler.load_weights(folder)
        self._remember(folder, stamp, weights)
        return weights

    def forget_deleted(self) -> None:
        """Let go of weights whose folders are gone: their sessions have ended, or they were deleted."""
        for folder in [folder for folder in self._in_memory if not folder.is_dir()]:
            del self._in_memory[folder]

    def _remember(self, folder: Path, stamp: int, weights: Weights) -> None:
        """And forget those that were used longest ago, where there are too many; the newest stay in any case."""
        n_bytes = sum(file.stat().st_size for file in folder.iterdir())
        self._in_memory[folder] = _Known(stamp, n_bytes, weights)
        self._in_memory.move_to_end(folder)
        total = sum(known.n_bytes for known in self._in_memory.values())
        while len(self._in_memory) > 1 and (total > MOST_BYTES or len(self._in_memory) > MOST_IN_MEMORY):
            _, forgotten = self._in_memory.popitem(last=False)
            total -= forgotten.n_bytes
