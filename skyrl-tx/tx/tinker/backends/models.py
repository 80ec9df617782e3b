"""The models under training of a backend."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from tx.models.config import LoraConfig
from tx.tinker.types import UserError

M = TypeVar("M")


class Models(dict[str, M]):
    """Models by id. A mistake in the id is the user's."""

    def __missing__(self, model_id: str) -> M:
        raise UserError(f"there is no model {model_id}; it was unloaded, or never created")

    def check_new(self, model_id: str) -> None:
        """Whether the id is free.

        Raises:
            UserError: it is not.
        """
        if model_id in self:
            raise UserError(f"there is a model {model_id} already")


def check_covers_any(covered: Sized, lora: LoraConfig, model: str) -> None:
    """Whether an adapter has anything to train in a model.

    Raises:
        UserError: it has nothing.
    """
    if not covered:
        parts = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
        wanted = ", ".join(f"train_{part}" for part, is_chosen in parts.items() if is_chosen)
        raise UserError(f"{model} has nothing that {wanted} could train; train more of it")
