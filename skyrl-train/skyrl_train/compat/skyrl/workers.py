"""SkyRL's worker classes. One class serves every role and strategy."""

from skyrl_train.workers.worker import Worker

__all__ = ["CriticWorker", "PolicyWorker", "RefWorker"]

PolicyWorker = CriticWorker = RefWorker = Worker
