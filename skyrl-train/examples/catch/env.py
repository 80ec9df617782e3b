"""Catch as an environment: one reply per turn, shaped or episodic reward."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from examples.catch.game import DEFAULT_GRID_H, DEFAULT_GRID_W, MOVES, CatchState, advance
from examples.catch.prompt import state_message
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.metrics import default_aggregate_metrics

RewardMode = Literal["shaped", "episodic"]


@dataclass(frozen=True, slots=True)
class CatchReward:
    """The reward of a turn, read from a dataset row's `reward_spec`.

    mode: ``shaped`` rewards approaching the ball in every turn, plus `step_penalty`, plus the ending. ``episodic``
        rewards only the ending.
    terminal_catch, terminal_miss: reward of the ending.
    """

    mode: RewardMode = "shaped"
    step_penalty: float = -0.01
    terminal_catch: float = 1.0
    terminal_miss: float = -1.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(RewardMode):
            raise ValueError(f"reward mode={self.mode!r} is unknown; use one of {', '.join(get_args(RewardMode))}")
        for name in ("step_penalty", "terminal_catch", "terminal_miss"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name}={value!r} must be a finite number")

    def of(self, before: CatchState, after: CatchState) -> float:
        """Return the reward of the turn from `before` to `after`: the sum of its components."""
        return sum(self.components(before, after).values())

    def components(self, before: CatchState, after: CatchState) -> dict[str, float]:
        """Return the components of the turn's reward, by name."""
        ending = (self.terminal_catch if after.is_caught else self.terminal_miss) if after.is_over else 0.0
        if self.mode == "episodic":
            return {"ending": ending}
        return {"approach": potential(after) - potential(before), "step": self.step_penalty, "ending": ending}


def potential(state: CatchState) -> float:
    """Return the potential of the paddle's position, φ = -|ball_x - paddle_x| / max(1, grid_w - 1), from -1 to 0.

    The "approach" rewards are differences of φ, so their sum over a game depends only on its first and last position.
    With grid_w 7, a paddle that starts 3 columns from the ball has φ = -0.5, catching the ball ends at φ = 0, and all
    moves together earn 0.5 on any way there.
    """
    return -state.distance / max(1, state.grid_w - 1)


def parse_action(reply: str) -> str:
    """Return the reply's first letter if it is L, R or S in either case, else S (stay)."""
    letter = reply.strip()[:1].upper()
    return letter if letter in MOVES else "S"


class CatchEnv(BaseTextEnv):
    """A game of Catch that starts as described by the dataset row.

    `extras` is the row: `reward_spec` has the fields of `CatchReward`. `extra_info` has `ball_x` and `paddle_x`, and
    optionally `ball_y` (0), `grid_w` (7), `grid_h` (6) and `max_turns` (by default the number of rows the ball falls).
    Other keys are ignored, including the trainer's ``extras["max_turns"]``: the row determines the length of the game.


    Raises:
        ValueError: the row does not describe a game. The message names the key, its value and the allowed values.
    """

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.reward = _parse_reward(extras)
        self.state = _parse_start(extras)
        self.max_turns = self.state.turns_left

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Play a turn with the first letter of the model's reply."""
        if self.state.is_over:
            raise RuntimeError(f"this game ended after turn {self.turns}; create a new CatchEnv for the next episode")
        self.turns += 1
        letter = parse_action(action)
        before, self.state = self.state, advance(self.state, letter)
        components = self.reward.components(before, self.state)
        return BaseTextEnvStepOutput(
            observations=self._observations(),
            reward=sum(components.values()),
            done=self.state.is_over,
            metadata={"caught": self.state.is_caught, "action": letter, "reward_components": components},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns played, 1 if the ball was caught, and otherwise by how far it was missed."""
        metrics: dict[str, Any] = {"steps": self.turns, "caught": int(self.state.is_caught)}
        if self.state.is_over and not self.state.is_caught:
            has_landed = self.state.ball_y == self.state.grid_h - 1
            metrics["failure"] = f"missed by {self.state.distance}" if has_landed else "out of turns"
        return metrics

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the mean number of turns, and the fraction of balls caught."""
        means = default_aggregate_metrics(metrics)
        names = {"steps": "avg_steps", "caught": "catch_rate"}
        return {name: means[key] for key, name in names.items() if key in means}

    def _observations(self) -> ConversationType:
        return [] if self.state.is_over else [state_message(self.state)]


def _parse_reward(extras: Mapping[str, Any]) -> CatchReward:
    spec = extras.get("reward_spec") or {}
    names = [field.name for field in fields(CatchReward)]
    return CatchReward(**{name: spec[name] for name in names if spec.get(name) is not None})


def _parse_start(extras: Mapping[str, Any]) -> CatchState:
    start = extras.get("extra_info") or {}
    grid_h = _integer(start, "grid_h", DEFAULT_GRID_H)
    max_turns = _integer(start, "max_turns", grid_h - 1)
    if max_turns < 1:
        raise ValueError(f"extra_info max_turns={max_turns}, grid_h={grid_h}: a game needs at least 1 turn and 2 rows")
    state = CatchState(
        grid_w=_integer(start, "grid_w", DEFAULT_GRID_W),
        grid_h=grid_h,
        ball_x=_integer(start, "ball_x"),
        ball_y=_integer(start, "ball_y", 0),
        paddle_x=_integer(start, "paddle_x"),
        turns_left=max_turns,
    )
    if state.has_landed:
        raise ValueError(f"extra_info ball_y={state.ball_y} is the bottom row (grid_h={grid_h}); start the ball higher")
    return state


def _integer(start: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return an integer from `extra_info`. Parquet stores a missing key as None, so None means missing."""
    value = start.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"extra_info has no {key!r}; it has {sorted(start)}. Rows of catch_dataset.py have it")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"extra_info {key}={value!r} must be a whole number, got {type(value).__name__}") from None
