"""Shared types: trajectories of rollouts, training batches, metrics, and specifications of models.

Letters in shapes: P prompts per step, G samples per prompt, B rows of L tokens, the last R of which are the response.
"""

from skyrl_gym.stop_reasons import StopReason
from skyrl_train.types.batch import Scores, Shard, TokenScores, TrainingBatch, ValueScores
from skyrl_train.types.metrics import Metric, MetricKind, Metrics, MetricSums
from skyrl_train.types.tokens import (
    UNKNOWN_EXPERT,
    DrawnPrompt,
    Message,
    PromptRow,
    Segment,
    Trajectory,
    TrajectoryID,
    Turn,
    WeightSpan,
    all_or_none,
    last_sampled,
)
