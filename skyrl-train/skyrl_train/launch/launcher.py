"""Interfaces that give a run its models, its engine and the weight sync between them."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import Objective
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.launch.lease import Lease
from skyrl_train.types.specs import ModelSpec, SyncKind
from skyrl_train.weight_sync import SyncOptions, WeightSink, WeightSync
from skyrl_train.weight_sync.base import Transport
from skyrl_train.workers.group import WorkerGroup

logger = logging.getLogger(__name__)

REASONS = {
    "auto": ("shared memory, and gloo between nodes", "the policy is not on a GPU"),
    "cuda_ipc": ("CUDA IPC", "sender and receiver are on the same GPUs"),
    "nccl": ("NCCL", "sender and receiver are on different GPUs"),
}
"""Name of each transport that may replace the configured one, and the reason to log."""


MakeEngine = Callable[[PreTrainedModel | None], InferenceEngine]
"""Creates an engine that generates with the policy, or with its own weights if that is None."""

Sinks = Mapping[str, WeightSink]
"""The receivers of a weight sync, by their names in error messages."""


class ModelLauncher(Protocol):
    """The ranks of one run."""

    device: torch.device
    """Kind of device that the ranks compute on."""

    async def start(self) -> None:
        """Start the processes."""

    async def load(self, spec: ModelSpec, objective: Objective | None) -> WorkerGroup:
        """Load a model on its ranks. Raise ConfigError if there is no model at its path."""

    async def close(self) -> None:
        """End the processes."""


class Launcher(ModelLauncher, Protocol):
    """The ranks and the engine of one run."""

    policy: PreTrainedModel | None
    """The loaded policy if it is in this process, so that an engine may generate with its tensors."""

    async def start_engine(self, make_engine: MakeEngine, start_timeout_s: float) -> InferenceEngine:
        """Call `make_engine(policy)` in the engine's process and return the engine.

        Raises:
            EngineError: the engine's process ended, or the engine was not ready within `start_timeout_s`.
        """

    def bytes_beside_engine(self, n_bytes: int) -> int:
        """Return how many of the `n_bytes` that all ranks have yet to allocate will be on the engine's device."""

    def weight_sync(
        self, source: WorkerGroup, sinks: Sinks, kind: SyncKind = "full", dtype: torch.dtype | None = None
    ) -> WeightSync:
        """Create a weight sync from a loaded model. `dtype` is the dtype of the sinks, by default the source's."""


def with_transport(options: SyncOptions, device: torch.device, *, shares_devices: bool) -> SyncOptions:
    """Return the options with the transport between models on this kind of device, and log it if it was replaced.

    `shares_devices` is True if a receiver is on the same GPU as a rank of the sender.
    """
    if options.transport not in ("nccl", "cuda_ipc") and not (options.transport == "auto" and options.prefers_gpus):
        return options
    transport: Transport = "nccl"
    if device.type == "cpu":
        transport = "auto"
    elif shares_devices:
        transport = "cuda_ipc"  # NCCL rejects two processes on one GPU
    if transport != options.transport != "auto":
        logger.info(
            "generator.weight_sync_backend=%s: weights travel through %s, because %s",
            *(options.transport, *REASONS[transport]),
        )
    return replace(options, transport=transport)


def holding_devices(lease: Lease | None, sinks: Sinks) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Return the context manager that holds the devices for a weight sync to the engine or the reference."""
    if lease is None:
        return nullcontext
    models = [sink for sink in sinks.values() if isinstance(sink, WorkerGroup)]
    return partial(lease.sending_to, models[0]) if models else lease.sending_to_engine


L = TypeVar("L", bound=ModelLauncher)


@asynccontextmanager
async def started(launcher: L) -> AsyncIterator[L]:
    """Start a launcher's processes, and end them when the context exits."""
    try:
        await launcher.start()
        yield launcher
    finally:
        await launcher.close()
