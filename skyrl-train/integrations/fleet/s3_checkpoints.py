"""The upload of checkpoints under the name that Fleet's scripts import; `trainer.remote_ckpt_url` turns it on."""

from skyrl_train.checkpoint.remote import RemoteCheckpoints, RemoteFolder, find_credentials_fault, upload_files

__all__ = ["RemoteCheckpoints", "RemoteFolder", "find_credentials_fault", "upload_files"]
