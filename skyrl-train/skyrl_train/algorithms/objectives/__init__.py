"""Objectives: losses as weighted sums over tokens, with weights computed once from the whole mini-batch."""

from skyrl_train.algorithms.objectives.objective import Objective, SupervisedObjective
from skyrl_train.algorithms.objectives.policy import PolicyObjective
from skyrl_train.algorithms.objectives.preference import PairObjective, PreferenceObjective, RewardObjective
from skyrl_train.algorithms.objectives.supervised import CrossEntropyObjective
from skyrl_train.algorithms.objectives.value import ValueObjective

__all__ = [
    "CrossEntropyObjective",
    "Objective",
    "PairObjective",
    "PolicyObjective",
    "PreferenceObjective",
    "RewardObjective",
    "SupervisedObjective",
    "ValueObjective",
]
