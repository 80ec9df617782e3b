"""Mixtures of experts with an adapter per expert, for models whose experts transformers can replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "skyrl_tx"
MATRICES = ("gate_proj", "up_proj", "down_proj")
MAX_DENSE_TOKENS = 64
"""Up to this many tokens, every expert computes every token. Batch sizes then do not depend on the routing, and a
token's result is bitwise independent of the other tokens.
"""


class TorchFactors(NamedTuple):
    """An adapter of one matrix: scale · B A. Experts have a leading dimension."""

    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)
    scale: float

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to the matrix's output for x (…, in)."""
        inner = linear(x.to(self.a.dtype), self.a) * self.scale
        return linear(inner, self.b).to(x.dtype)

    def by_expert(self) -> list[TorchFactors]:
        """Return the factors of each expert."""
        return [TorchFactors(a, b, self.scale) for a, b in zip(self.a.unbind(), self.b.unbind(), strict=True)]


def replace_experts(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Make a model's experts use `mix_experts`. Return the affected layers by path."""
    layers = {path: module for path, module in model.named_modules() if _is_supported(module)}
    if layers:
        model.config.get_text_config()._experts_implementation = NAME
    return layers


def mix_experts(layer: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Compute the mixture for hidden (N, D), with the chosen experts and their shares (N, k).

    Experts are added one by one, and each adds to a token at most once, so the order of summation is the same on every
    device, even where `index_add` leaves it undefined.
    """
    adapter: Mapping[str, TorchFactors] = getattr(layer, "adapter", {})
    factors = {name: factor.by_expert() for name, factor in adapter.items()}
    total = torch.zeros_like(hidden)
    for number, (gate_up, down) in enumerate(zip(layer.gate_up_proj.unbind(), layer.down_proj.unbind(), strict=True)):
        more = {name: factor[number] for name, factor in factors.items()}
        is_chosen = chosen == number
        share = (shares * is_chosen).sum(dim=-1, keepdim=True).to(hidden.dtype)  # (N, 1)
        if len(hidden) <= MAX_DENSE_TOKENS:
            total = total + share * _expert(layer, gate_up, down, more, hidden)
        elif len(rows := is_chosen.any(dim=-1).nonzero()[:, 0]):
            total = total.index_add(0, rows, share[rows] * _expert(layer, gate_up, down, more, hidden[rows]))
    return total


def _expert(
    layer: Any, gate_up: torch.Tensor, down: torch.Tensor, more: Mapping[str, TorchFactors], x: torch.Tensor
) -> torch.Tensor:
    middle = linear(x, gate_up)
    if more:
        middle = middle + torch.cat([more[name].product(x) for name in ("gate_proj", "up_proj")], dim=-1)
    middle = layer._apply_gate(middle)
    out = linear(middle, down)
    return out + more["down_proj"].product(middle) if more else out


def _is_supported(module: torch.nn.Module) -> bool:
    """Return True if a module has experts (E, out, in) without biases, with gate and up concatenated."""
    expected = {"has_gate": True, "is_concatenated": True, "has_bias": False, "is_transposed": False}
    return all(getattr(module, name, None) is value for name, value in expected.items())


ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)
