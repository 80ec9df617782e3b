"""The policy's objective: policy loss, KL divergence to the reference, and entropy."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.algorithms.contract import ResolvedPolicyLoss
from skyrl_train.algorithms.kl import compute_approx_kl, importance_weighted_kl
from skyrl_train.algorithms.masked import top_entropy_mask
from skyrl_train.algorithms.off_policy import add_rollout_gap, correction_weights, sequence_mask
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch
from skyrl_train.types import Metrics, MetricSums, TokenScores, TrainingBatch


class PolicyObjective:
    """Σ loss_weights · policy loss + Σ sequence_weights · (kl_loss_coef · KL - entropy_loss_coef · entropy).

    A policy loss that compares tokens across the mini-batch, or returns a scalar, has the scope `batch`. No rank has
    the whole mini-batch, so the driver computes the gradient g = ∂loss / ∂log π on all log-probs (`differentiate`), and
    the ranks minimize Σ g · log π, because by the chain rule its gradient in the weights is the same.
    """

    score_name = "logprobs"

    def __init__(self, loss: ResolvedPolicyLoss, algorithm: AlgorithmConfig) -> None:
        self._loss = loss
        self._algorithm = algorithm
        self.scope = loss.scope
        self.needs_entropy_grad = algorithm.use_entropy_loss

    def add_weights(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch with its weights. Tokens outside the top entropies have weight 0 in the policy loss."""
        algorithm, mask = self._algorithm, mini_batch.loss_mask
        draws, trajectories = mini_batch.draws, mini_batch.trajectories
        loss = token_weights(mask, algorithm.loss_reduction, algorithm.max_seq_len, draws, trajectories)
        if algorithm.top_entropy_quantile < 1:
            assert mini_batch.entropies is not None, "entropies are scored before the update"
            loss = loss * top_entropy_mask(mini_batch.entropies, mask, algorithm.top_entropy_quantile)
        by_sequence = token_weights(mask, "sequence_mean", trajectories=trajectories)
        return replace(mini_batch, loss_weights=loss, sequence_weights=by_sequence)

    def differentiate(self, log_probs: torch.Tensor, mini_batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Return the mini-batch with its weights and the policy loss's gradient in `log_probs` (B, R), and metrics.

        Rows without a trained token are ignored.
        """
        rows = mini_batch.loss_mask.any(dim=1).nonzero()[:, 0]
        gradient = torch.zeros_like(mini_batch.loss_mask)
        sums = MetricSums()
        if len(rows):
            trained = mini_batch.select(rows)
            chosen = log_probs[rows].detach().requires_grad_()
            loss = self._policy_loss(chosen, trained, sums)
            (gradient[rows],) = torch.autograd.grad(loss, chosen)
            sums.add("mean", "policy_loss", loss)
            sums.add("mean", "final_loss", loss, 0.0)  # the ranks add KL and entropy, and the weight
        return replace(mini_batch, logprob_gradient=gradient), sums.metrics()

    def __call__(self, scores: TokenScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return the loss of these rows, differentiable in the scores, and its metrics."""
        assert rows.sequence_weights is not None, "add_weights() comes first"
        algorithm, weights = self._algorithm, rows.sequence_weights
        weight = weights.sum()  # 1 over the mini-batch
        sums = MetricSums()
        regularization = scores.logprobs.new_zeros(())  # KL and entropy are measured even if the loss omits them
        entropy = weighted_sum(scores.entropy, weights)
        sums.add("mean", "policy_entropy", entropy, weight)
        if algorithm.use_entropy_loss:
            regularization = regularization - algorithm.entropy_loss_coef * entropy
        if rows.ref_logprobs is not None:
            estimator, mask = algorithm.kl_estimator_type, rows.loss_mask
            if algorithm.use_bias_correction_kl:
                old = _start_logprobs(scores.logprobs, rows)
                token_kl = importance_weighted_kl(scores.logprobs, rows.ref_logprobs, old, mask, estimator)
            else:
                token_kl = compute_approx_kl(scores.logprobs, rows.ref_logprobs, mask, estimator)
            kl = weighted_sum(token_kl, weights)
            sums.add("mean", "policy_kl", kl, weight)
            if algorithm.use_kl_loss:
                regularization = regularization + algorithm.kl_loss_coef * kl
        if rows.logprob_gradient is None:
            policy_loss = self._policy_loss(scores.logprobs, rows, sums)
            loss = policy_loss + regularization
            sums.add("mean", "policy_loss", policy_loss, weight)
            sums.add("mean", "final_loss", loss, weight)
        else:
            loss = (scores.logprobs * rows.logprob_gradient).sum() + regularization
            sums.add("mean", "final_loss", regularization, weight)
        if rows.rollout_logprobs is not None:
            add_rollout_gap(sums, _start_logprobs(scores.logprobs, rows), rows.rollout_logprobs, rows.loss_mask)
        return loss, sums.metrics()

    def _policy_loss(self, log_probs: torch.Tensor, rows: TrainingBatch, sums: MetricSums) -> torch.Tensor:
        """Return the policy loss of these rows, differentiable in `log_probs` (B, R).

        Off-policy corrections change the weight of each token's loss.
        """
        algorithm, mask = self._algorithm, rows.loss_mask
        assert rows.advantages is not None, "advantages are computed before the update"
        assert rows.loss_weights is not None, "add_weights() comes first"
        old = _start_logprobs(log_probs, rows)
        loss, metrics = self._loss(log_probs, old, rows.advantages, algorithm, mask, rows.rollout_logprobs)
        weights = rows.loss_weights
        if algorithm.off_policy_correction.is_on:
            if rows.rollout_logprobs is None:
                raise ConfigError(
                    "trainer.algorithm.off_policy_correction needs the engine's log-probs, but the generator reports "
                    "none; return rollout_logprobs, or remove the correction"
                )
            correction = algorithm.off_policy_correction
            factor, correction_metrics = correction_weights(old, rows.rollout_logprobs, mask, correction)
            weights, metrics = weights * factor, metrics | correction_metrics
        if algorithm.off_policy_sequence_mask_threshold is not None:
            sampled = old if rows.rollout_logprobs is None else rows.rollout_logprobs
            threshold = algorithm.off_policy_sequence_mask_threshold
            kept = sequence_mask(log_probs, sampled, rows.advantages, mask, threshold)
            weights, metrics = weights * kept, metrics | {"off_policy_sequence_masked": 1 - kept}
        for name, values in metrics.items():
            sums.add_samples(name, values[mask > 0])
        return loss if self._loss.reduces else weighted_sum(loss, weights)


def _start_logprobs(log_probs: torch.Tensor, rows: TrainingBatch) -> torch.Tensor:
    """Return log-probs (B, R) at the start of the update. Rows that are updated once have their current ones."""
    return log_probs.detach() if rows.old_logprobs is None else rows.old_logprobs
