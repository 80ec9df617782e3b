"""The policy's objective on any rows of a mini-batch: sums whose weights belong to the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.algorithms.contract import ResolvedPolicyLoss
from skyrl_train.algorithms.entropy import top_entropy_mask
from skyrl_train.algorithms.kl import compute_approx_kl, importance_weighted_kl
from skyrl_train.algorithms.off_policy import correction_weights, sequence_mask
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.logprobs import TokenScores
from skyrl_train.types import TrainingBatch

Terms = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Weights:
    """What each token (B, R) counts in the sums of a mini-batch; zero outside the loss mask."""

    loss: torch.Tensor  # by trainer.algorithm.loss_reduction, zero on tokens that the policy loss leaves out
    per_token: torch.Tensor  # every token the same
    per_sequence: torch.Tensor  # every trajectory the same

    @staticmethod
    def of(batch: TrainingBatch, algorithm: AlgorithmConfig) -> Weights:
        """The weights of a whole mini-batch."""
        mask = batch.loss_mask
        loss = token_weights(mask, algorithm.loss_reduction, algorithm.max_seq_len, batch.uids)
        if algorithm.top_entropy_quantile < 1:
            assert batch.entropies is not None, "the trainer scores entropies before it updates"
            loss = loss * top_entropy_mask(batch.entropies, mask, algorithm.top_entropy_quantile)
        return Weights(loss, token_weights(mask, "token_mean"), token_weights(mask, "sequence_mean"))

    def select(self, rows: Sequence[int]) -> Weights:
        """Those of some rows."""
        return Weights(self.loss[rows], self.per_token[rows], self.per_sequence[rows])

    def to(self, device: torch.device) -> Weights:
        """The same on another device."""
        return Weights(self.loss.to(device), self.per_token.to(device), self.per_sequence.to(device))


def start_logprobs(log_probs: torch.Tensor, part: TrainingBatch) -> torch.Tensor:
    """Log-probs (B, R) at the start of the update; a batch without them is the only one since its rollouts."""
    return log_probs.detach() if part.old_logprobs is None else part.old_logprobs


def policy_objective(
    policy_loss: ResolvedPolicyLoss,
    log_probs: torch.Tensor,
    part: TrainingBatch,
    weights: Weights,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor, Terms]:
    """The policy loss of these rows, differentiable in `log_probs` (B, R), and what it measured, without gradient."""
    assert part.advantages is not None, "the trainer computes advantages before it updates"
    old = start_logprobs(log_probs, part)
    loss, metrics = policy_loss(log_probs, old, part.advantages, algorithm, part.loss_mask, part.rollout_logprobs)
    if not policy_loss.reduces:
        factor, factor_metrics = _factors(log_probs, old, part.advantages, part, algorithm)
        metrics = metrics | factor_metrics
        loss = weighted_sum(loss, weights.loss if factor is None else weights.loss * factor)
    return loss, {name: weighted_sum(values, weights.per_token) for name, values in metrics.items()}


def _factors(
    log_probs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    part: TrainingBatch,
    algorithm: AlgorithmConfig,
) -> tuple[torch.Tensor | None, Terms]:
    """What the loss of each token (B, R) is multiplied by because another policy sampled it; None is by 1."""
    factor: torch.Tensor | None = None
    metrics: Terms = {}
    if algorithm.off_policy_correction.is_on:
        if part.rollout_logprobs is None:
            raise ConfigError(
                "trainer.algorithm.off_policy_correction needs the log-probs of the engine, and the generator reports "
                "none; return rollout_logprobs, or leave the correction out"
            )
        factor, metrics = correction_weights(
            old, part.rollout_logprobs, part.loss_mask, algorithm.off_policy_correction
        )
    if algorithm.off_policy_sequence_mask_threshold is not None:
        sampled = old if part.rollout_logprobs is None else part.rollout_logprobs
        kept = sequence_mask(
            log_probs, sampled, advantages, part.loss_mask, algorithm.off_policy_sequence_mask_threshold
        )
        factor = kept if factor is None else factor * kept
        metrics = metrics | {"off_policy_sequence_masked": 1 - kept}
    return factor, metrics


def regularisation_terms(
    scores: TokenScores, part: TrainingBatch, weights: Weights, algorithm: AlgorithmConfig
) -> Terms:
    """Entropy of these rows, and their KL divergence from the reference where there is one."""
    terms = {"policy_entropy": weighted_sum(scores.entropy, weights.per_sequence)}
    if part.ref_logprobs is not None:
        estimator, mask = algorithm.kl_estimator_type, part.loss_mask
        if algorithm.use_bias_correction_kl:
            old = start_logprobs(scores.logprobs, part)
            kl = importance_weighted_kl(scores.logprobs, part.ref_logprobs, old, mask, estimator)
        else:
            kl = compute_approx_kl(scores.logprobs, part.ref_logprobs, mask, estimator)
        terms["policy_kl"] = weighted_sum(kl, weights.per_sequence)
    return terms


def total_loss(policy_loss: torch.Tensor, terms: Terms, algorithm: AlgorithmConfig) -> torch.Tensor:
    """What is differentiated: policy loss, plus the KL term, less the entropy term of `regularisation_terms`."""
    loss = policy_loss
    if algorithm.use_kl_loss and "policy_kl" in terms:
        loss = loss + algorithm.kl_loss_coef * terms["policy_kl"]
    if algorithm.use_entropy_loss:
        loss = loss - algorithm.entropy_loss_coef * terms["policy_entropy"]
    return loss
