"""Trajectories for tests that need no rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.types import Trajectory, TrajectoryID


def make_trajectory(
    uid: str = "0", rewards: Sequence[float] | None = (0.0,), *, repetition: int = 0, **fields: Any
) -> Trajectory:
    """One token for each reward, all of them sampled; `rewards=None` is an invalid trajectory. `fields` win."""
    n_tokens = 1 if rewards is None else len(rewards)
    defaults: dict[str, Any] = {
        "env_class": "guess",
        "data_source": "unknown",
        "prompt_ids": [1, 2],
        "response_ids": list(range(3, 3 + n_tokens)),
        "loss_mask": [1] * n_tokens,
        "logprobs": [-0.5] * n_tokens,
        "rewards": None if rewards is None else list(rewards),
        "stop_reason": "stop",
    }
    return Trajectory(id=TrajectoryID(uid, repetition), **(defaults | fields))
