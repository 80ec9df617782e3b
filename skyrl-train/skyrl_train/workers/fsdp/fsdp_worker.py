"""The type of a rank under the names that SkyRL's scripts import.

One class serves every role and every strategy. The launcher makes its instances, in the driver or in actors.
"""

from skyrl_train.workers.worker import Worker

PolicyWorker = CriticWorker = RefWorker = Worker

__all__ = ["CriticWorker", "PolicyWorker", "RefWorker"]
