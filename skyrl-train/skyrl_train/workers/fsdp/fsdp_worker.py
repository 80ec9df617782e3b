"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.workers import CriticWorker as CriticWorker
from skyrl_train.compat.skyrl.workers import PolicyWorker as PolicyWorker
from skyrl_train.compat.skyrl.workers import RefWorker as RefWorker
