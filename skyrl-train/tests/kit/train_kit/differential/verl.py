"""Inputs for the functions of verl."""

from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig, PolicyLossConfig

from skyrl_train.algorithms import policy_loss
from skyrl_train.compat.skyrl.algorithms import reduce_loss
from skyrl_train.config.algorithm import AlgorithmConfig, LossReduction
from train_kit.differential.batches import Batch

Scored = tuple[torch.Tensor, torch.Tensor]
"""A loss, and its gradient in the log-probs (B, R)."""

AGGREGATION: dict[LossReduction, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_sum_norm": "seq-mean-token-sum-norm",
    "token_sum": "token-sum",
}


def rewards_by_group(batch: Batch, rewards: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of an estimator that compares the trajectories of a prompt."""
    return {
        "token_level_rewards": rewards.clone(),
        "response_mask": batch.mask,
        "index": np.array(batch.index, dtype=object),
    }


def actor(policy_loss_settings: dict[str, Any] | None = None, **settings: Any) -> ActorConfig:
    """Return the settings of a policy loss; the rest is required by the class."""
    loss_config = PolicyLossConfig(**(policy_loss_settings or {}))
    return ActorConfig(strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, policy_loss=loss_config, **settings)


def clips(low: float, high: float, **settings: Any) -> ActorConfig:
    """Return the settings of a clipped loss."""
    return actor(clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, **settings)


def our_loss(
    name: str, batch: Batch, advantages: torch.Tensor, config: AlgorithmConfig, reduction: LossReduction = "token_mean"
) -> Scored:
    """Return one of our policy losses over a batch; rollouts have the old log-probs."""
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, _ = policy_loss(name)(log_probs, batch.old_log_probs, advantages, config, batch.mask, batch.old_log_probs)
    total = reduce_loss(loss, batch.mask, reduction, max_seq_len=batch.mask.shape[1])
    return total, torch.autograd.grad(total, log_probs)[0]


def their_loss(
    name: str, batch: Batch, advantages: torch.Tensor, config: ActorConfig, reduction: LossReduction = "token_mean"
) -> Scored:
    """Return one of verl's policy losses over a batch."""
    log_probs = batch.log_probs.clone().requires_grad_()
    total, _ = get_policy_loss_fn(name)(
        batch.old_log_probs, log_probs, advantages, batch.mask, AGGREGATION[reduction], config
    )
    return total, torch.autograd.grad(total, log_probs)[0]


def assert_same_loss(ours: Scored, theirs: Scored, tolerance: float) -> None:
    """Assert that both have the same value and gradient, including that of padding."""
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.detach(), their.detach(), rtol=tolerance, atol=tolerance)
