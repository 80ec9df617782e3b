"""What lies outside of the loss mask never reaches a policy loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from skyrl_train.config.algorithm import AlgorithmConfig

LossOutput = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss of each token (B, R), and metrics (B, R) by name that are averaged over trained tokens."""

LossFunction = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AlgorithmConfig, torch.Tensor, torch.Tensor | None], LossOutput
]


def within_mask(loss: LossFunction) -> LossFunction:
    """Call a policy loss with tensors that are 0 outside of the mask and of which only `log_probs` has a gradient.

    So a NaN of padding reaches no value and no gradient, a sum over a row is a sum over its trained tokens, and the
    gradient outside of the mask is exactly 0. Without a mask, every token is trained.
    """

    @wraps(loss)
    def masked(
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        config: AlgorithmConfig,
        loss_mask: torch.Tensor | None = None,
        rollout_logprobs: torch.Tensor | None = None,
    ) -> LossOutput:
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask

        def inside(values: torch.Tensor) -> torch.Tensor:
            return torch.where(mask > 0, values, 0.0)

        return loss(
            inside(log_probs),
            inside(old_log_probs.detach()),
            inside(advantages.detach()),
            config,
            mask,
            None if rollout_logprobs is None else inside(rollout_logprobs.detach()),
        )

    return masked
