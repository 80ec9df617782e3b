"""Supervised fine-tuning on the trained tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.config.algorithm import LossReduction
from skyrl_train.lazy import torch
from skyrl_train.types import Metric, Metrics, MetricSums, TokenScores, TrainingBatch


class CrossEntropyObjective:
    """-log π of the trained tokens, by default the mean over the mini-batch."""

    needs_entropy_grad = False

    def __init__(self, reduction: LossReduction = "token_mean") -> None:
        self._reduction = reduction

    def weigh(self, mini_batch: TrainingBatch) -> TrainingBatch:
        weights = token_weights(
            mini_batch.loss_mask, self._reduction, index=mini_batch.draws, trajectories=mini_batch.trajectories
        )
        return replace(mini_batch, loss_weights=weights)

    def __call__(self, scores: TokenScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        assert rows.loss_weights is not None, "weigh() comes first"
        loss = weighted_sum(-scores.logprobs, rows.loss_weights)
        sums = MetricSums()
        sums.add("mean", "loss", (-scores.logprobs * rows.loss_mask).sum(), rows.loss_mask.sum())
        return loss, sums.metrics()

    def evaluate(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> Metrics:
        """Return the loss over all trained tokens of the rows."""
        total = -scores["logprobs"].double().sum().item()
        return Metrics({"loss": Metric("mean", total, rows.loss_mask.sum().item())})
