"""Trainable weights: a Hugging Face model, or a low-rank adapter for one.

An adapter (Hu et al., 2021, arXiv:2106.09685) adds scale · B A to matrices W of the model. Hooks apply it during the
computation. The model itself is never modified, so any number of adapters can share it.
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

from skyrl_train.media.processing import has_vision
from skyrl_train.models.vision import language_model_name
from tx.models.config import AdapterConfig
from tx.tinker.backends.models import check_covers_any
from tx.tinker.backends.torch.experts import MATRICES, TorchFactors, replace_experts

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that choose experts. Adapters do not cover them."""


@dataclass(frozen=True, slots=True)
class CoveredMatrix:
    """A matrix that adapters may cover, or the same matrix of all experts of a layer."""

    path: str  # e.g. model.layers.0.self_attn.q_proj; for experts model.layers.0.mlp.experts.gate_proj
    part: Literal["attn", "mlp", "unembed"]
    n_in: int
    n_out: int
    n_experts: int = 0

    @property
    def name(self) -> str:
        """Name of the matrix in its layer."""
        return self.path.rpartition(".")[2]

    def rank(self, lora: AdapterConfig) -> int:
        """Return the factors' rank."""
        return lora.expert_rank(self.n_experts) if self.n_experts else lora.rank


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A model and an optional adapter: factors by their matrix's path."""

    model: PreTrainedModel
    adapter: Mapping[str, TorchFactors] | None = None

    @property
    def trained(self) -> list[torch.Tensor]:
        """Trained tensors: the adapter's, or the whole model's if there is none."""
        if self.adapter is None:
            return list(self.model.parameters())
        return [factor for factors in self.adapter.values() for factor in (factors.a, factors.b)]

    def freeze(self) -> Weights:
        """Return an immutable copy."""
        if self.adapter is None:
            return Weights(copy.deepcopy(self.model).requires_grad_(False))
        copies = {
            path: TorchFactors(a.detach().clone(), b.detach().clone(), scale)
            for path, (a, b, scale) in self.adapter.items()
        }
        return Weights(self.model, copies)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the adapter within the block."""
        of_experts: dict[str, dict[str, TorchFactors]] = {}
        with ExitStack() as undo:
            for path, factors in (self.adapter or {}).items():
                if factors.a.ndim == 2:
                    undo.callback(self.model.get_submodule(path).register_forward_hook(partial(_add, factors)).remove)
                else:
                    layer, _, name = path.rpartition(".")
                    of_experts.setdefault(layer, {})[name] = factors
            for layer, factors_by_name in of_experts.items():
                experts: Any = self.model.get_submodule(layer)
                experts.adapter = factors_by_name
                undo.callback(delattr, experts, "adapter")
            yield


def _add(
    factors: TorchFactors, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
) -> torch.Tensor:
    return output + factors.product(inputs[0])


def new_weights(model: PreTrainedModel, lora: AdapterConfig, seed: int) -> Weights:
    """Create weights: a copy of the model for rank 0, else an adapter with zero effect (A uniform within ±1/√in, B
    zero).
    """
    if lora.rank == 0:
        return Weights(copy.deepcopy(model).requires_grad_(True))
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for matrix in covered_matrices(model, lora):
        experts, rank = [matrix.n_experts] * (matrix.n_experts > 0), matrix.rank(lora)
        bound = 1.0 / math.sqrt(matrix.n_in)
        a = torch.empty(*experts, rank, matrix.n_in).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(*experts, matrix.n_out, rank)
        a, b = (factor.to(model.device).requires_grad_() for factor in (a, b))
        adapter[matrix.path] = TorchFactors(a, b, lora.scale)
    return Weights(model, adapter)


def covered_matrices(model: PreTrainedModel, lora: AdapterConfig) -> list[CoveredMatrix]:
    """Return the matrices that an adapter covers.

    Raises:
        UserError: there are none.
    """
    is_chosen = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    chosen = [matrix for matrix in _matrices(model) if is_chosen[matrix.part]]
    check_covers_any(chosen, lora, f"this {type(model).__name__}")
    return chosen


def _matrices(model: PreTrainedModel) -> Iterator[CoveredMatrix]:
    """Yield all matrices that an adapter can cover: not a head tied to the embeddings, and not an image encoder."""
    experts = replace_experts(model)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    language_model = f"{language_model_name(model)}." if has_vision(model.config) else ""
    for path, module in model.named_modules():
        if module is not head and not path.startswith(language_model):
            continue
        if path in experts:
            n_experts, n_hidden, n_middle = module.down_proj.shape
            for name in MATRICES:
                sizes = (n_middle, n_hidden) if name == "down_proj" else (n_hidden, n_middle)
                yield CoveredMatrix(f"{path}.{name}", "mlp", *sizes, n_experts)
        elif isinstance(module, torch.nn.Linear) and path.rpartition(".")[2] not in ROUTERS:
            sizes = module.in_features, module.out_features
            if module is not head:
                yield CoveredMatrix(path, "attn" if "attn" in path or "attention" in path else "mlp", *sizes)
            elif module.weight is not embeddings.weight:
                yield CoveredMatrix(path, "unembed", *sizes)
