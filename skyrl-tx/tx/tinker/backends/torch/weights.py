"""What is trained and sampled from: a Hugging Face model by itself, or one with a low-rank adapter.

An adapter (Hu et al., 2021, arXiv:2106.09685) adds scale · B A to matrices W of the model. Hooks add it while the model
computes; the model itself is never changed, and any number of adapters share it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from tx.models.config import LoraConfig
from tx.tinker.backends.models import check_covers_any
from tx.tinker.backends.torch.experts import MATRICES, Factors, plug_in

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers of these names choose experts; adapters leave them as they are."""


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix that adapters may cover, or the same one of each of a layer's experts."""

    path: str  # e.g. model.layers.0.self_attn.q_proj, and of experts model.layers.0.mlp.experts.gate_proj
    part: Literal["attn", "mlp", "unembed"]
    n_in: int
    n_out: int
    n_experts: int = 0

    @property
    def name(self) -> str:
        """Of the matrix in its layer."""
        return self.path.rpartition(".")[2]

    def rank(self, lora: LoraConfig) -> int:
        """Of the factors."""
        return lora.expert_rank(self.n_experts) if self.n_experts else lora.rank


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model, and the adapter that it computes with: factors by the path of their place."""

    model: PreTrainedModel
    adapter: Mapping[str, Factors] | None = None

    @property
    def trained(self) -> list[torch.Tensor]:
        """What training changes: the adapter, or all of the model where there is none."""
        if self.adapter is None:
            return list(self.model.parameters())
        return [one for factors in self.adapter.values() for one in (factors.a, factors.b)]

    def frozen(self) -> Weights:
        """A copy that stays as it is."""
        if self.adapter is None:
            return Weights(copy.deepcopy(self.model).requires_grad_(False))
        copies = {
            path: Factors(a.detach().clone(), b.detach().clone(), scale) for path, (a, b, scale) in self.adapter.items()
        }
        return Weights(self.model, copies)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model computes with the adapter."""
        of_experts: dict[str, dict[str, Factors]] = {}
        with ExitStack() as undo:
            for path, factors in (self.adapter or {}).items():
                if factors.a.ndim == 2:
                    undo.callback(self.model.get_submodule(path).register_forward_hook(partial(_add, factors)).remove)
                else:
                    layer, _, name = path.rpartition(".")
                    of_experts.setdefault(layer, {})[name] = factors
            for layer, every in of_experts.items():
                experts: Any = self.model.get_submodule(layer)
                experts.adapter = every
                undo.callback(delattr, experts, "adapter")
            yield


def _add(factors: Factors, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return output + factors.added(inputs[0])


def new_weights(model: PreTrainedModel, lora: LoraConfig, seed: int) -> Weights:
    """Of rank 0, a copy of the model; else an adapter that changes nothing: A is uniform within ±1/√in, B zero."""
    if lora.rank == 0:
        return Weights(copy.deepcopy(model).requires_grad_(True))
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for place in covered(model, lora):
        experts, rank = [place.n_experts] * (place.n_experts > 0), place.rank(lora)
        bound = 1.0 / math.sqrt(place.n_in)
        a = torch.empty(*experts, rank, place.n_in).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(*experts, place.n_out, rank)
        a, b = (one.to(model.device).requires_grad_() for one in (a, b))
        adapter[place.path] = Factors(a, b, lora.scale)
    return Weights(model, adapter)


def covered(model: PreTrainedModel, lora: LoraConfig) -> list[Place]:
    """The matrices that an adapter covers.

    Raises:
        UserError: there are none.
    """
    is_chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    chosen = [place for place in _places(model) if is_chosen[place.part]]
    check_covers_any(chosen, lora, f"this {type(model).__name__}")
    return chosen


def _places(model: PreTrainedModel) -> Iterator[Place]:
    """All matrices that an adapter can cover. A head that is tied to the embeddings has none."""
    experts = plug_in(model)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in model.named_modules():
        if path in experts:
            yield from _expert_places(path, module)
        elif isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] not in ROUTERS:
            sizes = module.in_features, module.out_features
            if module is not head:
                yield Place(path, "attn" if "attn" in path or "attention" in path else "mlp", *sizes)
            elif module.weight is not embeddings.weight:
                yield Place(path, "unembed", *sizes)


def _expert_places(path: str, experts: Any) -> Iterator[Place]:
    n_experts, n_hidden, n_middle = experts.down_proj.shape
    for name in MATRICES:
        sizes = (n_middle, n_hidden) if name == "down_proj" else (n_hidden, n_middle)
        yield Place(f"{path}.{name}", "mlp", *sizes, n_experts)
