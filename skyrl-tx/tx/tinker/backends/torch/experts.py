"""Mixtures of experts, with an adapter for each expert, where transformers lets one plug them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "skyrl_tx"
MATRICES = ("gate_proj", "up_proj", "down_proj")
FEW = 64
"""So few tokens are computed by every expert. Which expert computes how many does then not depend on the tokens, and a
token gets the same whatever stands beside it, to the last bit."""


class Factors(NamedTuple):
    """What an adapter adds to one matrix: scale · B A. Experts are a dimension before the others."""

    a: torch.Tensor  # (rank, in)
    b: torch.Tensor  # (out, rank)
    scale: float

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """To the matrix's output for x (…, in)."""
        inner = linear(x.to(self.a.dtype), self.a) * self.scale
        return linear(inner, self.b).to(x.dtype)

    def of_experts(self) -> list[Factors]:
        """Those of each expert."""
        return [Factors(a, b, self.scale) for a, b in zip(self.a.unbind(), self.b.unbind(), strict=True)]


def plug_in(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Let a model's experts compute as here; the layers that do, by their paths."""
    layers = {path: module for path, module in model.named_modules() if _is_known(module)}
    if layers:
        model.config.get_text_config()._experts_implementation = NAME
    return layers


def mix_experts(layer: Any, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """hidden (N, D); the experts that the router has chosen, and how much each counts (N, k).

    Experts are added one after the other, and each adds to a token once, so that the order of sums is the same on every
    device, also where `index_add` leaves it open.
    """
    adapter: Mapping[str, Factors] = getattr(layer, "adapter", {})
    factors = {name: one.of_experts() for name, one in adapter.items()}
    total = torch.zeros_like(hidden)
    for number, (gate_up, down) in enumerate(zip(layer.gate_up_proj.unbind(), layer.down_proj.unbind(), strict=True)):
        more = {name: one[number] for name, one in factors.items()}
        is_chosen = chosen == number
        share = (shares * is_chosen).sum(dim=-1, keepdim=True).to(hidden.dtype)  # (N, 1)
        if len(hidden) <= FEW:
            total = total + share * _expert(layer, gate_up, down, more, hidden)
        elif len(rows := is_chosen.any(dim=-1).nonzero()[:, 0]):
            total = total.index_add(0, rows, share[rows] * _expert(layer, gate_up, down, more, hidden[rows]))
    return total


def _expert(
    layer: Any, gate_up: torch.Tensor, down: torch.Tensor, more: Mapping[str, Factors], x: torch.Tensor
) -> torch.Tensor:
    middle = linear(x, gate_up)
    if more:
        middle = middle + torch.cat([more[name].added(x) for name in ("gate_proj", "up_proj")], dim=-1)
    middle = layer._apply_gate(middle)
    out = linear(middle, down)
    return out + more["down_proj"].added(middle) if more else out


def _is_known(module: torch.nn.Module) -> bool:
    """Experts (E, out, in) without biases, gate over up."""
    expected = {"has_gate": True, "is_concatenated": True, "has_bias": False, "is_transposed": False}
    return all(getattr(module, name, None) is value for name, value in expected.items())


ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)
