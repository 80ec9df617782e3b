"""Interface between a loss and the ranks that minimize it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from skyrl_train.lazy import torch
from skyrl_train.types import Metrics, TrainingBatch


class Objective(Protocol):
    """A loss whose gradient does not depend on how the mini-batch is split into micro-batches and ranks.

    The driver calls `weigh` on the whole mini-batch to set the divisors. Ranks call the objective on parts of it and
    add up the results. The scores are the model's `TokenScores` or `ValueScores`.
    """

    needs_entropy_grad: bool
    """True if the loss differentiates the entropy. This costs the model two more values per logit."""

    def weigh(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch with `loss_weights` and `sequence_weights` (B, R) filled in."""
        ...

    def __call__(self, scores: Any, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return Σ weights · loss over these rows, not divided by anything, and metrics that merge over rows."""
        ...


class SupervisedObjective(Objective, Protocol):
    """A loss on a fixed dataset. It can also be evaluated on held-out rows."""

    def evaluate(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> Metrics:
        """Return the loss and other metrics of rows, from their scores (B, R). Metrics of calls can be merged."""
        ...
