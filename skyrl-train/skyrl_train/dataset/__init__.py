"""Prompt rows in, training batches out."""

from skyrl_train.dataset.prompts import PromptDataset

__all__ = ["PromptDataset"]
