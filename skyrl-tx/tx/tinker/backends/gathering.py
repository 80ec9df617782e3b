"""What the micro-batches of a pass give, put together; the same for every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from tx.tinker.types import Datum, PassResult

G = TypeVar("G")
"""Gradients, of a kind that only the backend knows."""


class Gathering(Generic[G]):
    """Results for each datum, and the sum of the gradients."""

    def __init__(self, data: Sequence[Datum], add: Callable[[G, G], G]) -> None:
        """`add` may change its first."""
        self._data = data
        self._add = add
        self._logprobs: list[np.ndarray] = [np.empty(0)] * len(data)
        self._token_losses = list(self._logprobs)
        self._gradients: G | None = None

    def put(self, places: Sequence[int], logprobs: np.ndarray, token_losses: np.ndarray, gradients: G | None) -> None:
        """Rows (M, L, …) of a micro-batch: `places` says which of the data they are; what is beyond is padding."""
        for row, place in enumerate(places):
            n = len(self._data[place].tokens)
            self._logprobs[place], self._token_losses[place] = logprobs[row, :n], token_losses[row, :n]
        self._gradients = self._sum(self._gradients, gradients)

    def added_to(self, gradients: G | None) -> G | None:
        """Those of earlier passes, and these."""
        return self._sum(gradients, self._gradients)

    @property
    def result(self) -> PassResult:
        """Of the whole pass."""
        loss = float(sum(np.sum(one, dtype=np.float64) for one in self._token_losses))
        return PassResult(loss, self._logprobs, self._token_losses)

    def _sum(self, total: G | None, gradients: G | None) -> G | None:
        if total is None or gradients is None:
            return gradients if total is None else total
        return self._add(total, gradients)
