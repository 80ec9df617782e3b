"""Weights to sample from, by what clients call them. They are in folders, and those used last in memory."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from pathlib import Path

from tx.tinker.backends.base import Backend, Sampler, Weights
from tx.tinker.checkpoint_files import checkpoint_folder, snapshot_folder, write_folder
from tx.tinker.config import TxConfig
from tx.tinker.types import UserError
from tx.tinker.wire.sample_job import SampleWeights

MOST_IN_MEMORY = 64


class Samplers:
    """Frozen weights."""

    def __init__(self, config: TxConfig, backend: Backend, sampler: Sampler) -> None:
        self._config = config
        self._backend = backend
        self._sampler = sampler
        self._in_memory: OrderedDict[Path, tuple[int, Weights]] = OrderedDict()

    def keep(self, sampling_session_id: str, model_id: str) -> None:
        """A model's weights as they are now are those of a sampling session from now on."""
        folder = snapshot_folder(self._config, sampling_session_id)
        write_folder(folder, partial(self._backend.save_weights, model_id))
        self._remember(folder, self._sampler.weights_of(model_id))

    def find(self, told: SampleWeights) -> Weights:
        """The weights that a client means.

        Raises:
            UserError: they are gone.
        """
        if told.snapshot is not None:
            folder = snapshot_folder(self._config, told.snapshot)
        elif told.model_path is not None:
            folder = checkpoint_folder(self._config, told.model_path)
        else:
            return self._sampler.base_weights()
        if not folder.is_dir():
            raise UserError(f"there are no weights {told.model_path or told.snapshot}; they were deleted")
        stamp = folder.stat().st_mtime_ns  # a checkpoint may have been overwritten
        known = self._in_memory.get(folder)
        if known is not None and known[0] == stamp:
            self._in_memory.move_to_end(folder)
            return known[1]
        weights = self._sampler.load_weights(folder)
        self._remember(folder, weights)
        return weights

    def forget_deleted(self) -> None:
        """Let go of weights whose folders are gone: their sessions have ended, or they were deleted."""
        for folder in [folder for folder in self._in_memory if not folder.is_dir()]:
            del self._in_memory[folder]

    def _remember(self, folder: Path, weights: Weights) -> None:
        self._in_memory[folder] = (folder.stat().st_mtime_ns, weights)
        self._in_memory.move_to_end(folder)
        while len(self._in_memory) > MOST_IN_MEMORY:
            self._in_memory.popitem(last=False)
