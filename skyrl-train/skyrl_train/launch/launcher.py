"""The interfaces through which a run gets its models, its engine and the weight sync between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.lease import Lease
from skyrl_train.types.specs import ModelSpec, SyncKind
from skyrl_train.weight_sync import WeightSink, WeightSync
from skyrl_train.workers.group import WorkerGroup


class ModelLauncher(Protocol):
    """The ranks of one run."""

    device: torch.device
    """The kind of device that the ranks compute on."""

    async def start(self) -> None:
        """Start the processes."""
        ...

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        """Load a model on its ranks; ConfigError if its path holds none."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


class Launcher(ModelLauncher, Protocol):
    """The ranks and the engine of one run."""

    policy: PreTrainedModel | None
    """The loaded policy, if it is in this process: an engine may generate with its tensors."""

    async def start_engine(
        self, make_engine: Callable[[PreTrainedModel | None], InferenceEngine], start_timeout_s: float
    ) -> InferenceEngine:
        """Return a new engine: `make_engine(policy)`, called in the process of the engine.

        Raises:
            EngineError: another process ended, or its engine was not ready in `start_timeout_s`.
        """
        ...

    def bytes_beside_engine(self, n_bytes: int) -> int:
        """Return the part of `n_bytes`, which all ranks together still allocate, that is in the engine's memory."""
        ...

    def weight_sync(
        self,
        source: WorkerGroup,
        sinks: Mapping[str, WeightSink],
        kind: SyncKind = "full",
        dtype: torch.dtype | None = None,
    ) -> WeightSync:
        """Return a channel for the weights of a model that this launcher has loaded, or for its adapter alone.

        Sinks have names for error messages, and hold weights in `dtype`, by default that of the source.
        """
        ...


def holding_devices(
    lease: Lease | None, sinks: Mapping[str, WeightSink]
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Return the context of a weight sync from the policy to the engine, or to the reference."""
    if lease is None:
        return nullcontext
    models = [sink for sink in sinks.values() if isinstance(sink, WorkerGroup)]
    return partial(lease.sending_to, models[0]) if models else lease.sending_to_engine


L = TypeVar("L", bound=ModelLauncher)


@asynccontextmanager
async def started(launcher: L) -> AsyncIterator[L]:
    """Start the processes of a launcher, and end them at the end of the context."""
    try:
        await launcher.start()
        yield launcher
    finally:
        await launcher.close()
