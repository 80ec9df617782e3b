"""The models under training of a backend."""

from __future__ import annotations

from typing import TypeVar

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
