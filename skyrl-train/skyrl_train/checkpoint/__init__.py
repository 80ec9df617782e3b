"""Checkpoints that are complete or absent, and their copies in remote storage."""

from skyrl_train.checkpoint.durable import DISK_ERRORS, disk_error, folder_lock, make_folder, replace_text, to_bytes
from skyrl_train.checkpoint.remote import RemoteCheckpoints, find_credentials_fault, open_folder, upload_files
from skyrl_train.checkpoint.store import CheckpointStore, step_of, write_complete
from skyrl_train.checkpoint.writer import CheckpointWriter, Snapshot
