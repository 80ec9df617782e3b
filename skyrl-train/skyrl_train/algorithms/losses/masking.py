"""Inputs of policy losses, set to 0 outside the loss mask."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeAlias

from skyrl_train.algorithms.registry import PolicyLoss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch

LossOutput: TypeAlias = "tuple[torch.Tensor, dict[str, torch.Tensor]]"
"""The loss of each token (B, R), and metrics (B, R) by name that are averaged over trained tokens."""


@dataclass(frozen=True)
class Tokens:
    """Inputs of a policy loss, all (B, R) and 0 outside the mask."""

    log_probs: torch.Tensor
    """Log-probs of the policy. Only they have a gradient."""
    old_log_probs: torch.Tensor
    """Log-probs at the start of the update."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """Above 0 on trained tokens."""
    rollout_logprobs: torch.Tensor | None
    """Log-probs of the engine, if it reports them."""

    @property
    def log_ratio(self) -> torch.Tensor:
        """log(π / π_old) (B, R)."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> torch.Tensor:
        """π / π_old (B, R)."""
        return importance_ratio(self.log_probs, self.old_log_probs)


def importance_ratio(log_probs: torch.Tensor, behavior_log_probs: torch.Tensor) -> torch.Tensor:
    """Return π / μ per token (B, R), with log(π / μ) clamped to ±20 so that no ratio overflows."""
    return (log_probs - behavior_log_probs).clamp(-20, 20).exp()


def within_mask(loss: Callable[[Tokens, AlgorithmConfig], LossOutput]) -> PolicyLoss:
    """Turn a function of `Tokens` into a policy loss.

    Inputs outside the mask become 0. So a NaN in padding affects no value and no gradient, a sum over a row is a sum
    over its trained tokens, and the gradient outside the mask is exactly 0. Without a mask, every token is trained.
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

        tokens = Tokens(
            log_probs=inside(log_probs),
            old_log_probs=inside(old_log_probs.detach()),
            advantages=inside(advantages.detach()),
            mask=mask,
            rollout_logprobs=None if rollout_logprobs is None else inside(rollout_logprobs.detach()),
        )
        return loss(tokens, config)

    masked.__signature__ = inspect.signature(masked, follow_wrapped=False)  # type: ignore[attr-defined]
    return masked
