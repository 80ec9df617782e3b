"""The upload of checkpoints, under the name that Fleet's scripts import. Enable it with `trainer.remote_ckpt_url`."""

from skyrl_report.remote import RemoteFolder
from skyrl_train.checkpoint.remote import RemoteCheckpoints, find_credentials_fault, upload_files

__all__ = ["RemoteCheckpoints", "RemoteFolder", "find_credentials_fault", "upload_files"]
