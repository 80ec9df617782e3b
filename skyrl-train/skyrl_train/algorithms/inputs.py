"""Inputs of advantage estimators: their names and their values, one row per trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from skyrl_train.algorithms.registry import AdvantageEstimator
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch
from skyrl_train.types import TrainingBatch

FROM_POLICY = frozenset({"old_log_probs", "entropies", "sum_pi_squared"})
FROM_GREEDY_ROLLOUTS = frozenset({"greedy_rewards"})
"""Inputs that are computed only if an estimator requires them."""

INPUTS = (
    frozenset({"token_level_rewards", "response_mask", "index", "reward_components", "values", "ref_log_probs"})
    | frozenset({"config", "gamma", "lambd", "grpo_norm_by_std"})
    | FROM_POLICY
    | FROM_GREEDY_ROLLOUTS
)
"""Inputs that a run may provide."""


def required_inputs(estimator: AdvantageEstimator) -> frozenset[str]:
    """Return the arguments of an estimator without a default."""
    parameters = inspect.signature(estimator).parameters.values()
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return frozenset(p.name for p in named if p.default is p.empty)


def readable_inputs(estimator: AdvantageEstimator) -> frozenset[str]:
    """Return the inputs that an estimator may read: its arguments, or all inputs if it takes `**kwargs` (not `**_`)."""
    parameters = inspect.signature(estimator).parameters.values()
    if any(p.kind is p.VAR_KEYWORD and not p.name.startswith("_") for p in parameters):
        return INPUTS
    return INPUTS & {p.name for p in parameters}


def named_inputs(estimator: AdvantageEstimator, available: Mapping[str, Any]) -> dict[str, Any]:
    """Return the available inputs among an estimator's arguments, or all of them if it takes `**kwargs`."""
    parameters = inspect.signature(estimator).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(available)
    return {name: value for name, value in available.items() if name in parameters}


class TrajectoryView:
    """The T trajectories of a batch, each as one row of R' tokens.

    A trajectory whose history was rewritten has several rows. They are joined with one column between them whose mask
    is 0, as for an observation. So estimators count time, turns and tokens over the whole trajectory, and advantages do
    not depend on how it was split. For example, responses `a b` and `c` are joined into `a b . c`.
    """

    def __init__(self, batch: TrainingBatch) -> None:
        is_last = batch.is_last_row
        self.last_rows = is_last.nonzero()[:, 0]  # (T,) the last row of each trajectory
        self._is_trivial = bool(is_last.all())
        if self._is_trivial:
            return
        response = batch.attention_mask[:, -batch.response_length :]  # (B, R), padded on the right
        lengths = response.sum(dim=1)  # (B,)
        trajectory = is_last.long().cumsum(0) - is_last.long()  # (B,) trajectory of each row, from 0
        ends = (lengths + 1).cumsum(0)  # (B,) including the column between rows
        starts = ends - (lengths + 1)
        first_rows = torch.cat([torch.zeros(1, dtype=torch.long), self.last_rows[:-1] + 1])
        offsets = starts - starts[first_rows][trajectory]  # (B,) columns of the trajectory's earlier rows
        self._width = int((offsets + lengths).max())
        columns = offsets[:, None] + torch.arange(batch.response_length)
        self._is_token = response > 0  # (B, R)
        self._index = (trajectory[:, None] * self._width + columns)[
            self._is_token
        ]  # (N,) indices into the flattened (T, R')

    def __len__(self) -> int:
        return len(self.last_rows)

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of rows (B, R) as values of trajectories (T, R'), 0 between and after the rows."""
        if self._is_trivial:
            return values
        joined = values.new_zeros(len(self) * self._width)
        joined[self._index] = values[self._is_token]
        return joined.view(len(self), self._width)

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of trajectories (T, R') as values of rows (B, R), 0 on padding: the inverse of `join`."""
        if self._is_trivial:
            return values
        split_values = values.new_zeros(self._is_token.shape)
        split_values[self._is_token] = values.reshape(-1)[self._index]
        return split_values

    def take_last_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return one value per trajectory (T,) from values (B,) that all its rows share."""
        return values[self.last_rows]


def estimator_inputs(batch: TrainingBatch, view: TrajectoryView, config: AlgorithmConfig) -> dict[str, Any]:
    """Return all inputs that a scored batch and the settings provide, with one row per trajectory."""
    computed = {
        "values": batch.values,
        "old_log_probs": batch.old_logprobs,
        "ref_log_probs": batch.ref_logprobs,
        "entropies": batch.entropies,
        "sum_pi_squared": batch.sum_pi_squared,
    }
    assert batch.rewards is not None, "only rollouts have advantages"
    inputs: dict[str, Any] = {
        "token_level_rewards": view.join(batch.rewards),
        "response_mask": view.join(batch.loss_mask),
        "index": [str(draw) for draw in view.take_last_rows(batch.draws).tolist()],
        "reward_components": {name: view.take_last_rows(total) for name, total in batch.reward_components.items()},
        **{name: view.join(tensor) for name, tensor in computed.items() if tensor is not None},
        **collect_settings(config),
    }
    if batch.greedy_rewards is not None:
        inputs["greedy_rewards"] = view.take_last_rows(batch.greedy_rewards)
    return inputs


def collect_settings(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the inputs that come from the configuration."""
    return {"config": config, "gamma": config.gamma, "lambd": config.lambd, "grpo_norm_by_std": config.grpo_norm_by_std}
