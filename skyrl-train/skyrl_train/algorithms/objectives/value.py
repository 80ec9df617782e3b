"""The critic's objective: predict the returns."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.algorithms.losses import value_loss
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.lazy import torch
from skyrl_train.types import Metrics, MetricSums, TrainingBatch, ValueScores


class ValueObjective:
    """The clipped squared error of the values, with the same weight for every trajectory."""

    needs_entropy_grad = False

    def __init__(self, value_clip: float | None) -> None:
        self._value_clip = value_clip

    def weigh(self, mini_batch: TrainingBatch) -> TrainingBatch:
        weights = token_weights(mini_batch.loss_mask, "sequence_mean", trajectories=mini_batch.trajectories)
        return replace(mini_batch, loss_weights=weights)

    def __call__(self, scores: ValueScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        assert rows.loss_weights is not None, "weigh() comes first"
        assert rows.values is not None, "values are scored before the update"
        assert rows.returns is not None, "returns are computed before the update"
        token_loss, token_metrics = value_loss(scores.values, rows.values, rows.returns, self._value_clip)
        loss = weighted_sum(token_loss, rows.loss_weights)
        is_trained = rows.loss_mask > 0
        sums = MetricSums()
        sums.add("mean", "critic_loss", loss, rows.loss_weights.sum())
        sums.add_samples("values_mean", scores.values[is_trained])
        for name, values in token_metrics.items():
            sums.add_samples(name, values[is_trained])
        return loss, sums.metrics()
