"""Checkpoints: complete or absent."""

from skyrl_train.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore"]
