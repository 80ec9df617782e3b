"""The interface between a loss and the ranks that minimise it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from skyrl_train.types import Metrics, TrainingBatch


class Objective(Protocol):
    """A loss of a mini-batch that may be divided among micro-batches and ranks without changing its gradient.

    The driver calls `weigh` on the whole mini-batch, which is where divisors come from. Ranks call the objective on
    any part of it and add up. The scores are those of the model: `TokenScores` or `ValueScores`.
    """

    needs_entropy_grad: bool
    """True if the loss differentiates the entropy, for which the model holds two more values per logit."""

    def weigh(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch with `loss_weights` and `sequence_weights` (B, R) filled in."""
        ...

    def __call__(self, scores: Any, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return Σ weights · loss over these rows, never divided, and metrics that merge over rows."""
        ...
