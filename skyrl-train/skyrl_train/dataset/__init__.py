"""Datasets of prompts, demonstrations and preferences, and the batches built from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_train.dataset.prompts import PromptDataset

__all__ = ["PromptDataset"]


def __getattr__(name: str) -> Any:
    if name != "PromptDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skyrl_train.dataset.prompts import PromptDataset  # imports transformers: slow, and row checks do not need it

    return PromptDataset
