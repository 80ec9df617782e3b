"""AdamW for one model: `torch.optim.AdamW` with new settings in every step.

Everything is computed in float32. Most updates are too small to change a bfloat16 number, so bfloat16 models also keep
their weights in float32 (Micikevicius et al., 2018, arXiv:1710.03740) and compute with rounded copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tx.tinker.backends.models import check_grad_norm
from tx.tinker.types import AdamParams

MIN_EPS = torch.finfo(torch.float32).tiny
"""Minimum eps. With eps 0, parameters that never had a gradient would step by 0 / 0."""


@dataclass(frozen=True, slots=True)
class TorchMoments:
    """Optimizer state, in the order of its tensors."""

    first: Sequence[torch.Tensor]
    second: Sequence[torch.Tensor]
    n_steps: int
    master_weights: Sequence[torch.Tensor] | None = None  # the tensors in float32, if they are not


@dataclass(frozen=True, slots=True)
class TorchOptimizer:
    """The optimizer of a model's tensors."""

    tensors: Sequence[torch.Tensor]
    adamw: torch.optim.AdamW  # over the tensors, or over their float32 copies

    @property
    def updated_tensors(self) -> list[torch.Tensor]:
        """Tensors that AdamW updates."""
        updated_tensors: list[torch.Tensor] = self.adamw.param_groups[0]["params"]
        return updated_tensors


def new_optimizer(tensors: Sequence[torch.Tensor], moments: TorchMoments | None = None) -> TorchOptimizer:
    """Create an optimizer, with the state in `moments` if given."""
    updated_tensors = list(tensors)
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        master_weights = tensors if moments is None or moments.master_weights is None else moments.master_weights
        updated_tensors = [
            values.detach().to(tensor.device, torch.float32, copy=True)
            for values, tensor in zip(master_weights, tensors, strict=True)
        ]
    adamw = torch.optim.AdamW(updated_tensors)
    if moments is None:
        moments = TorchMoments(
            [torch.zeros_like(tensor) for tensor in updated_tensors],
            [torch.zeros_like(tensor) for tensor in updated_tensors],
            0,
        )
    for tensor, first, second in zip(updated_tensors, moments.first, moments.second, strict=True):
        adamw.state[tensor] = {
            "step": torch.tensor(float(moments.n_steps)),
            "exp_avg": first.detach().to(tensor),
            "exp_avg_sq": second.detach().to(tensor),
        }
    return TorchOptimizer(tensors, adamw)


def moments_of(optimizer: TorchOptimizer) -> TorchMoments:
    """Return an optimizer's state."""
    updated_tensors = optimizer.updated_tensors
    states = [optimizer.adamw.state[tensor] for tensor in updated_tensors]
    first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
    is_wide = any(updated is not tensor for updated, tensor in zip(updated_tensors, optimizer.tensors, strict=True))
    return TorchMoments(first, second, int(states[0]["step"]), updated_tensors if is_wide else None)


def adam_step(optimizer: TorchOptimizer, gradients: Sequence[torch.Tensor], params: AdamParams) -> float:
    """Update the optimizer's tensors. Return the gradient norm before clipping.

    Raises:
        UserError: the norm is NaN or infinite. Nothing was updated.
    """
    updated_tensors, group = optimizer.updated_tensors, optimizer.adamw.param_groups[0]
    wide = [gradient.to(tensor.dtype) for tensor, gradient in zip(updated_tensors, gradients, strict=True)]
    norm = torch.nn.utils.get_total_norm(wide)
    check_grad_norm(float(norm))
    for tensor, gradient in zip(updated_tensors, wide, strict=True):
        tensor.grad = gradient
    if params.grad_clip_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(updated_tensors, params.grad_clip_norm, norm)
    group["lr"], group["weight_decay"] = params.learning_rate, params.weight_decay
    group["betas"], group["eps"] = (params.beta1, params.beta2), max(params.eps, MIN_EPS)
    optimizer.adamw.step()
    optimizer.adamw.zero_grad(set_to_none=True)
    with torch.no_grad():
        for tensor, updated in zip(optimizer.tensors, updated_tensors, strict=True):
            if tensor is not updated:
                tensor.copy_(updated)
    return float(norm)
