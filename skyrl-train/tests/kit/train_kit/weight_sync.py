"""Senders and receivers of weight syncs in this process, and transfers between threads."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from skyrl_train.config.policy import LoraConfig
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.models.lora import add_adapter, sync_tensors, trained_parameters
from skyrl_train.types.specs import LoraSpec, SyncKind, TensorSpec
from skyrl_train.weight_sync import (
    MirroredReceiver,
    Receipt,
    Receiver,
    SyncOptions,
    SyncPlan,
    WeightMirror,
    WeightSync,
    send,
)
from skyrl_train.weight_sync.base import Transport
from skyrl_train.weight_sync.sync import free_port
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
    engine: InferenceEngine, named_tensors: Callable[[], NamedTensors], version: int, transport: Transport = "shared"
) -> None:
    """Send weights to the engine, as `version`."""
    options = SyncOptions(transport, timeout_s=SYNC_TIMEOUT_S)
    await WeightSync(TensorSource(named_tensors), {"the engine": engine}, options)(version)


# -- transfers between threads

Tensors = dict[str, torch.Tensor]


def random_tensors(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Return tensors named layer.0, layer.1, …"""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)}


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def plan_for(tensors: Mapping[str, torch.Tensor], transport: Transport = "auto", **options: Any) -> SyncPlan:
    """Return the sender's plan; receivers are engine 0, 1 and 2."""
    names = ("rank 0 of the policy", "engine 0", "engine 1", "engine 2")
    options = {"timeout_s": 60.0, "names": names, "chunk_bytes": 1024} | options
    return SyncPlan(1, transport, f"127.0.0.1:{free_port()}", tuple(specs_of(tensors)), **options)


def receive(plan: SyncPlan, into: Mapping[str, torch.Tensor] | None = None) -> tuple[Tensors, Receipt]:
    """Receive copies of all tensors."""
    receiver = Receiver(plan, into)
    return {name: tensor.clone() for name, tensor in receiver}, receiver.receipt


def transfer(
    plan: SyncPlan,
    tensors: Tensors,
    *,
    into: Mapping[str, torch.Tensor] | None = None,
    sent_weights: SentWeights | None = None,
) -> tuple[Receipt, list[tuple[Tensors, Receipt]]]:
    """Run the sender and all receivers in threads."""
    with ThreadPoolExecutor(plan.n_receivers + 1) as threads:
        receiving = [threads.submit(receive, replace(plan, rank=i + 1), into) for i in range(plan.n_receivers)]
        sent = threads.submit(send, plan, iter(tensors.items()), sent_weights)
        return sent.result(), [future.result() for future in receiving]


class TensorCopy:
    """A `WeightSource` of these tensors, and a `WeightSink` that receives in place."""

    n_weight_copies = 1

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.sent_weights = SentWeights()
        self.plans: list[SyncPlan] = []
        """Plans by which it received."""

    async def tensor_specs(self, kind: SyncKind) -> list[TensorSpec]:
        """Return name, shape and dtype of each tensor."""
        return specs_of(self.tensors)

    async def send_weights(self, plan: SyncPlan) -> Receipt:
        """Send the tensors as planned."""
        sent_weights = self.sent_weights if plan.tracks_changes else None
        return await asyncio.to_thread(send, plan, iter(self.tensors.items()), sent_weights)

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Receive into the tensors."""
        self.plans.append(plan)
        return (await asyncio.to_thread(receive, plan, self.tensors))[1]
