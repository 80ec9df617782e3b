"""The worker under the names that SkyRL's scripts import: one class serves every strategy."""

from skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker

__all__ = ["CriticWorker", "PolicyWorker", "RefWorker"]
