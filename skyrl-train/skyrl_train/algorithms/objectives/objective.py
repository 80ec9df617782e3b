"""Interface between a loss and the ranks that minimize it, and the objectives with a single loss term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from skyrl_train.algorithms.losses import value_loss
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.lazy import torch
from skyrl_train.types import Metric, Metrics, MetricSums, TokenScores, TrainingBatch, ValueScores


class Objective(Protocol):
    """A loss whose gradient does not depend on how the mini-batch is split into micro-batches and ranks.

    The driver calls `add_weights` on the whole mini-batch to set the divisors. Ranks call the objective on parts of it
    and add up the results. The scores are the model's `TokenScores` or `ValueScores`.
    """

    needs_entropy_grad: bool
    """True if the loss differentiates the entropy. This costs the model two more values per logit."""

    def add_weights(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch with `loss_weights` and `sequence_weights` (B, R) filled in."""

    def __call__(self, scores: Any, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return Σ weights · loss over these rows, not divided by anything, and metrics that merge over rows."""


class SupervisedObjective(Objective, Protocol):
    """A loss on a fixed dataset. It can also be evaluated on held-out rows."""

    def evaluate(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> Metrics:
        """Return the loss and other metrics of rows, from their scores (B, R). Metrics of calls can be merged."""


class CrossEntropyObjective:
    """Mean of -log π over the trained tokens of the mini-batch."""

    needs_entropy_grad = False

    def add_weights(self, mini_batch: TrainingBatch) -> TrainingBatch:
        return replace(mini_batch, loss_weights=token_weights(mini_batch.loss_mask, "token_mean"))

    def __call__(self, scores: TokenScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        assert rows.loss_weights is not None, "add_weights() comes first"
        loss = weighted_sum(-scores.logprobs, rows.loss_weights)
        sums = MetricSums()
        sums.add("mean", "loss", (-scores.logprobs * rows.loss_mask).sum(), rows.loss_mask.sum())
        return loss, sums.metrics()

    def evaluate(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> Metrics:
        """Return the loss over all trained tokens of the rows."""
        total = -scores["logprobs"].double().sum().item()
        return Metrics({"loss": Metric("mean", total, rows.loss_mask.sum().item())})


class ValueObjective:
    """The clipped squared error of the values, with the same weight for every trajectory."""

    needs_entropy_grad = False

    def __init__(self, value_clip: float | None) -> None:
        self._value_clip = value_clip

    def add_weights(self, mini_batch: TrainingBatch) -> TrainingBatch:
        weights = token_weights(mini_batch.loss_mask, "sequence_mean", trajectories=mini_batch.trajectories)
        return replace(mini_batch, loss_weights=weights)

    def __call__(self, scores: ValueScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        assert rows.loss_weights is not None, "add_weights() comes first"
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
