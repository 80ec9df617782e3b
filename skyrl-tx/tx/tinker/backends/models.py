"""A backend's models under training, and the results of their passes."""

import math
from collections.abc import Callable, Sequence, Sized
from typing import Generic, TypeVar

import numpy as np

from tx.models.config import AdapterConfig
from tx.tinker.types import Datum, PassResult, UserError

M = TypeVar("M")
G = TypeVar("G")
"""Gradients, in a backend-specific type."""


class Models(dict[str, M]):
    """Models by id. A missing id raises `UserError`."""

    def __missing__(self, model_id: str) -> M:
        raise UserError(f"there is no model {model_id}; it was unloaded, or never created")

    def check_new(self, model_id: str) -> None:
        """Check that a model id is unused.

        Raises:
            UserError: a model already has it.
        """
        if model_id in self:
            raise UserError(f"model {model_id} already exists")


def check_grad_norm(norm: float) -> None:
    """Check a model's gradient norm before a step changes the model.

    Raises:
        UserError: the norm is NaN or infinite.
    """
    if not math.isfinite(norm):
        raise UserError(
            f"the step was not applied, because the norm of the gradients is {norm}. All gradients since the previous "
            "step were dropped; lower the learning rate, or check the advantages and log-probs of the data"
        )


def check_covers_any(matrices: Sized, lora: AdapterConfig, model: str) -> None:
    """Check that an adapter covers at least one matrix of a model.

    Raises:
        UserError: it covers none.
    """
    if not matrices:
        parts = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        wanted = ", ".join(f"train_{part}" for part, is_chosen in parts.items() if is_chosen)
        raise UserError(
            f"{model} has nothing to train with {wanted}; enable more of train_attn, train_mlp and train_unembed"
        )


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
