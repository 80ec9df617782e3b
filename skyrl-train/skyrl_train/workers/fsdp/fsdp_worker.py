"""The worker under the names that SkyRL's scripts import: one class serves every role, and every strategy."""

from skyrl_train.workers.worker import Worker

PolicyWorker = CriticWorker = RefWorker = Worker

__all__ = ["CriticWorker", "PolicyWorker", "RefWorker"]
