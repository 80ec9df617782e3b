"""AdamW for one model: `torch.optim.AdamW`, whose settings come with every step."""

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


def new_optimizer(tensors: Sequence[torch.Tensor], moments: Moments | None = None) -> torch.optim.AdamW:
    """One that has done no step, or goes on where another was."""
    optimizer = torch.optim.AdamW(tensors)
    if moments is None:
        moments = Moments([torch.zeros_like(one) for one in tensors], [torch.zeros_like(one) for one in tensors], 0)
    for tensor, first, second in zip(tensors, moments.first, moments.second, strict=True):
        optimizer.state[tensor] = {
            "step": torch.tensor(float(moments.n_steps)),
            "exp_avg": first.detach().to(tensor),
            "exp_avg_sq": second.detach().to(tensor),
        }
    return optimizer


def moments_of(optimizer: torch.optim.AdamW) -> Moments:
    """Its state."""
    states = [optimizer.state[tensor] for tensor in optimizer.param_groups[0]["params"]]
    first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    return Moments(first, second, int(states[0]["step"]))


def adam_step(optimizer: torch.optim.AdamW, gradients: Sequence[torch.Tensor], params: AdamParams) -> float:
    """Change the optimizer's tensors; the norm of the gradients before they were clipped."""
    group = optimizer.param_groups[0]
    for tensor, gradient in zip(group["params"], gradients, strict=True):
        tensor.grad = gradient
    norm = torch.nn.utils.get_total_norm(gradients)
    if params.grad_clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(group["params"], params.grad_clip_norm, norm)
    group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
    group["betas"], group["eps"] = (params.beta1, params.beta2), max(params.eps, LEAST_EPS)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)
