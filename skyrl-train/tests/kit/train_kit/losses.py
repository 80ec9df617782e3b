"""Policy losses of a few tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.algorithms import policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig

Rows = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Scored:
    """Loss of each token, gradient of the masked sum in the log-probs, and metrics; as lists."""

    loss: list[list[float]]
    gradient: list[list[float]]
    metrics: dict[str, list[list[float]]]


def score(
    name: str,
    log_probs: Rows,
    advantages: Rows,
    *,
    old: Rows | None = None,
    rollout: Rows | None = None,
    mask: Rows | None = None,
    config: AlgorithmConfig | None = None,
) -> Scored:
    """Call a registered loss in double precision; `old` defaults to `log_probs` and `mask` to all ones."""
    policy = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    loss_mask = torch.ones_like(policy, requires_grad=False) if mask is None else torch.tensor(mask)
    loss, metrics = policy_loss(name)(
        policy,
        policy.detach() if old is None else torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        config or AlgorithmConfig(),
        loss_mask,
        None if rollout is None else torch.tensor(rollout, dtype=torch.float64),
    )
    torch.where(loss_mask > 0, loss, 0.0).sum().backward()
    return Scored(loss.tolist(), policy.grad.tolist(), {key: value.tolist() for key, value in metrics.items()})
