"""Objectives: what a model minimises on a mini-batch, as sums whose weights belong to the whole of it."""

from skyrl_train.algorithms.objectives.objective import Objective
from skyrl_train.algorithms.objectives.policy import PolicyObjective
from skyrl_train.algorithms.objectives.supervised import CrossEntropyObjective
from skyrl_train.algorithms.objectives.value import ValueObjective

__all__ = ["CrossEntropyObjective", "Objective", "PolicyObjective", "ValueObjective"]
