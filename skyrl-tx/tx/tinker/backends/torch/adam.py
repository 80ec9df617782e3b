"""AdamW for one model: `torch.optim.AdamW`, whose settings come with every step.

All of it is in float32. Most steps are too small to change a number in bfloat16: so the weights of a model in bfloat16
are kept in float32 as well (Micikevicius et al., 2018, arXiv:1710.03740), and those it computes with are rounded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tx.tinker.types import AdamParams

LEAST_EPS = torch.finfo(torch.float32).tiny
"""Where a gradient has always been 0, a step of eps 0 would be 0 / 0."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What the optimizer keeps, in the order of its tensors."""

    first: Sequence[torch.Tensor]
    second: Sequence[torch.Tensor]
    n_steps: int
    wide: Sequence[torch.Tensor] | None = None  # the tensors in float32, where they are not


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What changes a model's tensors."""

    tensors: Sequence[torch.Tensor]
    adamw: torch.optim.AdamW  # of the same tensors, or of theirs in float32

    @property
    def stepped(self) -> list[torch.Tensor]:
        """The tensors that the steps are of."""
        stepped: list[torch.Tensor] = self.adamw.param_groups[0]["params"]
        return stepped


def new_optimizer(tensors: Sequence[torch.Tensor], moments: Moments | None = None) -> Optimizer:
    """One that has done no step, or goes on where another was."""
    stepped = list(tensors)
    if any(one.dtype != torch.float32 for one in tensors):
        wide = tensors if moments is None or moments.wide is None else moments.wide
        stepped = [
            one.detach().to(tensor.device, torch.float32, copy=True) for one, tensor in zip(wide, tensors, strict=True)
        ]
    adamw = torch.optim.AdamW(stepped)
    if moments is None:
        moments = Moments([torch.zeros_like(one) for one in stepped], [torch.zeros_like(one) for one in stepped], 0)
    for tensor, first, second in zip(stepped, moments.first, moments.second, strict=True):
        adamw.state[tensor] = {
            "step": torch.tensor(float(moments.n_steps)),
            "exp_avg": first.detach().to(tensor),
            "exp_avg_sq": second.detach().to(tensor),
        }
    return Optimizer(tensors, adamw)


def moments_of(optimizer: Optimizer) -> Moments:
    """Its state."""
    stepped = optimizer.stepped
    states = [optimizer.adamw.state[tensor] for tensor in stepped]
    first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    is_wide = any(one is not tensor for one, tensor in zip(stepped, optimizer.tensors, strict=True))
    return Moments(first, second, int(states[0]["step"]), stepped if is_wide else None)


def adam_step(optimizer: Optimizer, gradients: Sequence[torch.Tensor], params: AdamParams) -> float:
    """Change the optimizer's tensors; the norm of the gradients before they were clipped."""
    stepped, group = optimizer.stepped, optimizer.adamw.param_groups[0]
    for tensor, gradient in zip(stepped, gradients, strict=True):
        tensor.grad = gradient.to(tensor.dtype)
    norm = torch.nn.utils.get_total_norm([tensor.grad for tensor in stepped if tensor.grad is not None])
    if params.grad_clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(stepped, params.grad_clip_norm, norm)
    group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
    group["betas"], group["eps"] = (params.beta1, params.beta2), max(params.eps, LEAST_EPS)
    optimizer.adamw.step()
    optimizer.adamw.zero_grad(set_to_none=True)
    with torch.no_grad():
        for tensor, one in zip(optimizer.tensors, stepped, strict=True):
            if tensor is not one:
                tensor.copy_(one)
    return float(norm)
