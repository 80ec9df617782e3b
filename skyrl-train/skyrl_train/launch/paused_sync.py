"""A weight sync while rollouts are in progress."""

from __future__ import annotations

from contextlib import suppress

from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.types import Metrics
from skyrl_train.weight_sync import WeightSync
from skyrl_train.workers.group import WorkerGroup


class PausedSync:
    """A weight sync that pauses the engine, whose requests continue with the new weights."""

    def __init__(self, sync: WeightSync, engine: InferenceEngine, policy: WorkerGroup) -> None:
        self._sync = sync
        self._engine = engine
        self._policy = policy
        self._n_steps = policy.n_optimizer_steps  # at the last sync

    async def __call__(self, version: int) -> Metrics:
        """Send the weights as `version`. Raises the errors of `WeightSync`."""
        await self._engine.pause()
        try:
            metrics = await self._sync(version)
        except BaseException:
            with suppress(EngineError):  # the first error explains it
                await self._engine.resume()
            raise
        self._n_steps = self._policy.n_optimizer_steps
        await self._engine.resume()
        return metrics

    def is_current(self) -> bool:
        """Return True if the policy has not been updated since the last sync."""
        return self._policy.n_optimizer_steps == self._n_steps
