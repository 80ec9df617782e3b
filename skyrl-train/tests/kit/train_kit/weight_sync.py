"""Senders and receivers of weight syncs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.config.policy import LoraConfig
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.models.lora import add_adapter, sync_tensors, trained_parameters
from skyrl_train.types.specs import LoraSpec, SyncKind, TensorSpec
from skyrl_train.weight_sync import MirroredReceiver, Receipt, SyncOptions, SyncPlan, WeightMirror, WeightSync, send
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.transfer import SentWeights

NamedTensors = Iterable[tuple[str, torch.Tensor]]
SYNC_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A `WeightSource` in this process."""

    named_tensors: Callable[[], NamedTensors]
    sent_weights: SentWeights = field(default_factory=SentWeights)

    async def tensor_specs(self, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return name, shape and dtype of each tensor."""
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.named_tensors()]

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the tensors as planned; a broadcast blocks until they are received."""
        tensors = ((name, tensor.detach()) for name, tensor in self.named_tensors())
        return await asyncio.to_thread(send, plan, tensors, self.sent_weights if plan.tracks_changes else None)


def add_random_adapter(model: PreTrainedModel, **settings: Any) -> None:
    """Add an adapter that changes the model."""
    add_adapter(model, LoraSpec(LoraConfig(**settings), "trainer.policy.model.lora", "base"))
    change_adapter(model, 0)


def change_adapter(model: PreTrainedModel, version: int) -> None:
    """Give the adapter random values, which depend on the version."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A `WeightSource` of a model with an adapter, in this process."""

    model: PreTrainedModel

    async def tensor_specs(self, kind: SyncKind = "full") -> list[TensorSpec]:
        """Return name, shape and dtype of each tensor."""
        named = sync_tensors(self.model, kind, torch.Tensor.detach)
        return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the tensors as planned."""
        return await asyncio.to_thread(send, plan, sync_tensors(self.model, plan.kind, torch.Tensor.detach))


class MirroredSink:
    """A `WeightSink` that uses tensors only after the last one has arrived."""

    n_weight_copies = 1

    def __init__(self) -> None:
        self.mirror = WeightMirror()
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: list[SyncKind] = []  # of the syncs so far

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive whole tensors."""
        self.kinds.append(plan.kind)
        receiver = MirroredReceiver(plan, self.mirror)
        received = await asyncio.to_thread(list, receiver)
        self.tensors = {name: tensor.clone() for name, tensor in received}
        return receiver.receipt


async def sync_weights(
    engine: InferenceEngine,
    named_tensors: Callable[[], NamedTensors],
    version: int,
    transport: Transport = "shared",
) -> None:
    """Send weights to the engine, as `version`."""
    options = SyncOptions(transport, timeout_s=SYNC_TIMEOUT_S)
    await WeightSync(TensorSource(named_tensors), {"the engine": engine}, options)(version)
