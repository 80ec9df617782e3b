"""Datasets of prompts, and batches made of trajectories."""

from skyrl_train.dataset.prompts import PromptDataset

__all__ = ["PromptDataset"]
