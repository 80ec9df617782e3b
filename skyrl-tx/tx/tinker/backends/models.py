"""A backend's models under training."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import TypeVar

from tx.models.config import AdapterConfig
from tx.tinker.types import UserError

M = TypeVar("M")


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
