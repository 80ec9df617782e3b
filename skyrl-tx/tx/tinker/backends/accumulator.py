"""Collect the results of a pass's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from tx.tinker.types import Datum, PassResult

G = TypeVar("G")
"""Gradients, in a backend-specific type."""


class PassAccumulator(Generic[G]):
    """Accumulator of a pass's gradients and its results per datum."""

    def __init__(self, data: Sequence[Datum], add: Callable[[G, G], G]) -> None:
        """Collect results of `data`. `add` may modify its first argument."""
        self._data = data
        self._add = add
        self._logprobs: list[np.ndarray] = [np.empty(0)] * len(data)
        self._token_losses = list(self._logprobs)
        self._gradients: G | None = None

    def add_rows(
        self, indices: Sequence[int], logprobs: np.ndarray, token_losses: np.ndarray, gradients: G | None
    ) -> None:
        """Add a micro-batch's rows (M, L, …). `indices` maps rows to data. Extra rows are padding."""
        for row, index in enumerate(indices):
            n = len(self._data[index].tokens)
            self._logprobs[index], self._token_losses[index] = logprobs[row, :n], token_losses[row, :n]
        self._gradients = self._sum(self._gradients, gradients)

    def add_to(self, gradients: G | None) -> G | None:
        """Add this pass's gradients to earlier passes' gradients."""
        return self._sum(gradients, self._gradients)

    @property
    def result(self) -> PassResult:
        """Result of the whole pass."""
        loss = float(sum(np.sum(losses, dtype=np.float64) for losses in self._token_losses))
        return PassResult(loss, self._logprobs, self._token_losses)

    def _sum(self, total: G | None, gradients: G | None) -> G | None:
        if total is None or gradients is None:
            return gradients if total is None else total
        return self._add(total, gradients)
