"""Objectives: losses as weighted sums over tokens, with weights computed once from the whole mini-batch."""

from skyrl_train.algorithms.objectives.objective import (
    CrossEntropyObjective,
    Objective,
    SupervisedObjective,
    ValueObjective,
)
from skyrl_train.algorithms.objectives.policy import PolicyObjective
from skyrl_train.algorithms.objectives.preference import PairObjective, PreferenceObjective, RewardObjective
