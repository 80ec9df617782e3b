"""Algorithms under SkyRL's names. The implementations are in `skyrl_train.algorithms`.

Three things differ from SkyRL:

- Policy losses return the loss of each token (B, R), and the trainer reduces it over the whole mini-batch. A custom
  loss may still return a scalar.
- `ppo_policy_loss` is only the loss `regular`.
- Registries live in the driver, which passes functions to its workers, so there is nothing to synchronize.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.algorithms.inputs import collect_settings, named_inputs
from skyrl_train.algorithms.kl import KLController
from skyrl_train.algorithms.masked import normalize_over_batch
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.algorithms.registry import ADVANTAGE_ESTIMATORS
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from skyrl_train.lazy import torch


class AdaptiveKLController(KLController):
    """A `KLController` with a target."""

    def __init__(self, init_kl_coef: float, target: float, horizon: int) -> None:
        super().__init__(init_kl_coef, target, horizon)


class FixedKLController(KLController):
    """A constant `KLController`."""

    def __init__(self, kl_coef: float) -> None:
        super().__init__(kl_coef)


def compute_advantages_and_returns(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[str],
    adv_estimator: str,
    config: AlgorithmConfig,
    **inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a registered estimator's advantages and returns (B, R). It gets the `inputs` that it declares."""
    rows = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "index": index}
    estimator = ADVANTAGE_ESTIMATORS.get(adv_estimator)
    return estimator(**named_inputs(estimator, {**collect_settings(config), **inputs, **rows}))


def reduce_loss(
    loss: torch.Tensor,
    loss_mask: torch.Tensor | None,
    loss_reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[str] | None = None,
) -> torch.Tensor:
    """Reduce a loss per token (B, R) to its `weighted_sum` with `token_weights`. No mask means a mask of ones.

    This is for custom policy losses that return a scalar. The divisor counts only the given rows, so micro-batches
    yield a mean of means. Return one value per token to have the trainer divide by the whole mini-batch.

    >>> loss, loss_mask = torch.tensor([[3.0, 3.0, 3.0], [1.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> reduce_loss(loss, loss_mask, "token_mean"), reduce_loss(loss, loss_mask, "sequence_mean")
    (tensor(2.5000), tensor(2.))

    Raises:
        ConfigError: the reduction needs `max_seq_len` or `index`, or is unknown.
    """
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    return weighted_sum(loss, token_weights(mask, loss_reduction, max_seq_len, index))


def normalize_advantages_dict(data: dict[str, Any]) -> dict[str, Any]:
    """Normalize `data["advantages"]` (B, R) over the trained tokens, in place."""
    data["advantages"] = normalize_over_batch(data["advantages"], data["loss_mask"])
    return data
