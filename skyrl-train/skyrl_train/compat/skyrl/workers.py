"""SkyRL's worker classes. One class serves every role and strategy."""

from skyrl_train.workers.worker import Worker

PolicyWorker = CriticWorker = RefWorker = Worker
