"""The type of a rank under SkyRL's names: one class serves every role and strategy."""

from skyrl_train.workers.worker import Worker

PolicyWorker = CriticWorker = RefWorker = Worker
