"""Checkpoints: complete or absent."""

from skyrl_train.checkpoint.durable import disk_error, make_folder, replace_text
from skyrl_train.checkpoint.lock import folder_lock
from skyrl_train.checkpoint.store import CheckpointStore, write_complete

__all__ = [
    "CheckpointStore",
    "disk_error",
    "folder_lock",
    "make_folder",
    "replace_text",
    "write_complete",
]
