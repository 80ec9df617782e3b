"""Devices whose memory an engine and models use in turn."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.types.specs import ModelPart
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)


class Lease:
    """Exclusive use of device memory that an engine and models share.

    While one of them computes, the rest is offloaded: the engine sleeps, and models move to host memory. Only the
    policy's weights stay on the devices with the engine, because they may be needed at any time: after a sync, the
    policy scores the engine's samples, and a replacement for a lost engine receives them.

    An engine that generates with the policy's own tensors releases only its cache, and models stay on their device.
    """

    def __init__(self, *, moves_models: bool = True) -> None:
        """Create an empty lease. Call `add_model` for each model, the policy first, then `add_engine`.

        With `moves_models=False`, models stay on the devices, and only the engine sleeps.
        """
        self.moves_models = moves_models
        self._models: list[WorkerGroup] = []
        self._engine: InferenceEngine | None = None
        self._user: WorkerGroup | InferenceEngine | None = None  # None if unused, or after a failed handover
        self._lock = asyncio.Lock()
        self._entering: asyncio.Task[None] | None = None  # wakes up the engine

    async def add_model(self, model: WorkerGroup) -> None:
        """Add a model that has been loaded. Everything but the policy's weights leaves the devices immediately."""
        model.hold_devices = self.holding
        self._models.append(model)
        await self._bring_policy()

    def add_engine(self, engine: InferenceEngine) -> None:
        """Add the engine. It must be awake."""
        self._engine = self._user = engine
        if self._models and self.moves_models:
            logger.info("Models and engines leave their devices while they are idle (trainer.placement.offload_idle)")

    async def close(self) -> None:
        """Wait for the engine if it is waking up."""
        if self._entering is not None:
            await asyncio.wait([self._entering])

    @asynccontextmanager
    async def holding(self, model: WorkerGroup, part: ModelPart) -> AsyncIterator[None]:
        """Hold the devices, with a part of a model on them.

        Raise EngineError if the engine runs requests, and WorkerError if a rank fails or host memory is too small.
        """
        async with self._lock:
            if self._user is not model:  # move everything else off the devices
                self._user, started = None, time.monotonic()
                if self._engine is not None:
                    await self._engine.sleep()
                others = [other for other in self._models if other is not model and self.moves_models]
                n_bytes = sum([await other.move("cpu") for other in others])
                self._user = model
                _log_change(f"the {model.role}", n_bytes, started)
            await model.move("device", part)
            yield

    async def enter_engine(self) -> None:
        """Wake up the engine, unless it is awake. A cancelled call does not interrupt it.

        Raise EngineError if the engine is closed or fails, and WorkerError if a rank fails or host memory is too small.
        """
        if self._user is self._engine:
            return
        if self._entering is None or self._entering.done():
            self._entering = asyncio.create_task(self._enter_engine())
        await asyncio.shield(self._entering)

    async def _enter_engine(self) -> None:
        async with self._lock:
            if self._user is self._engine:
                return
            assert self._engine is not None, "add_engine() comes first"
            started = time.monotonic()
            n_bytes = await self._bring_policy()
            await self._engine.wake_up()
            self._user = self._engine
            _log_change("the engine", n_bytes, started)

    @asynccontextmanager
    async def sending_to_engine(self) -> AsyncIterator[None]:
        """Hold the devices while the policy sends its weights to the engine, then hand them to the engine.

        The engine allocates its cache last, because a sync also needs memory.
        """
        async with self._lock:
            assert self._engine is not None, "add_engine() comes first"
            if self._user is not self._engine:
                started = time.monotonic()
                n_bytes = await self._bring_policy()
                await self._engine.wake_up("weights")
                _log_change("the engine, for its weights,", n_bytes, started)
            yield
            if self.moves_models:
                await self._models[0].move("cpu", "optimizer")  # also frees the sync's memory
            await self._engine.wake_up()
            self._user = self._engine

    @asynccontextmanager
    async def sending_to(self, model: WorkerGroup) -> AsyncIterator[None]:
        """Hold the devices while the policy sends its weights to another model."""
        async with self._lock:
            if self._engine is not None:
                await self._engine.sleep()
            await self._bring_policy()
            await model.move("device", "weights")
            yield

    async def _bring_policy(self) -> int:
        """Move the policy's weights to the devices and all else to host memory. Return the number of moved bytes."""
        self._user = None
        if not self.moves_models:
            return 0
        policy, *others = self._models
        n_bytes = sum([await other.move("cpu") for other in others])
        return n_bytes + await policy.move("cpu", "optimizer") + await policy.move("device", "weights")


def _log_change(user: str, n_bytes: int, started: float) -> None:
    seconds = time.monotonic() - started
    logger.debug("Shared devices go to %s after %.2f s, in which %.3g GB were moved", user, seconds, n_bytes / 1e9)
