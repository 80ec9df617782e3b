"""A rollout in the making, and the trajectory that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.generators.base import RolloutRequest, request_seed
from skyrl_train.generators.conversation import Place, TokenConversation
from skyrl_train.generators.episodes import Episode
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import Segment, SegmentBuilder, Trajectory, Turn


@dataclass(slots=True)
class TurnRecord:
    """What is known of a turn besides where it stands."""

    result: EngineResult
    prompt_length: int
    reward: float | list[float] = 0.0  # one for the turn, or one for each of its tokens


@dataclass(slots=True)
class Rollout:
    """One attempt at a rollout."""

    request: RolloutRequest
    run_seed: int
    attempt: int = 0
    episode: Episode | None = None
    conversation: TokenConversation | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    reward_components: dict[str, float] = field(default_factory=dict)
    env_metrics: dict[str, Any] = field(default_factory=dict)
    generate_s: float = 0.0
    env_s: float = 0.0
    stop_reason: str | None = None  # set when the rollout is over
    error: str | None = None
    cause: BaseException | None = None  # of the error

    @property
    def session_id(self) -> str:
        """The engine's name for this attempt; no other attempt of the run has it."""
        return self.request.id.session_id(self.attempt)

    @property
    def seed(self) -> int:
        """The randomness of the next turn: a function of what it is, not of when or beside what it runs."""
        return request_seed(self.run_seed, self.request.id, len(self.turns))

    @property
    def env_class(self) -> str:
        """The environment that is played."""
        return self.request.row.env_class or "unknown"

    @property
    def is_over(self) -> bool:
        """Whether no turn follows."""
        return self.stop_reason is not None

    @property
    def n_response_tokens(self) -> int:
        """Tokens after the prompt."""
        return 0 if self.conversation is None else self.conversation.n_response_tokens

    def fail(self, stop_reason: str, error: str, cause: BaseException | None = None) -> None:
        """End as an invalid trajectory; what went wrong first is the reason."""
        if self.error is None:
            self.stop_reason, self.error, self.cause = stop_reason, error, cause

    def trajectory(self) -> Trajectory:
        """Return what the trainer sees: the response ends with the last sampled token."""
        assert self.stop_reason is not None
        rows, places = [SegmentBuilder([], 0)], list[Place]()
        if self.conversation is not None:
            self.conversation.finish()
            rows, places = self.conversation.rows, self.conversation.places
        if places and not rows[-1].response_length:
            self.fail("empty_response", "the environment left nothing of the reply, which its reward could be for")
        return Trajectory(
            id=self.request.id,
            env_class=self.env_class,
            data_source=self.request.row.data_source,
            segments=_segments(rows, places, self.turns),
            stop_reason=self.stop_reason,
            error=self.error,
            reward_components=self.reward_components,
            env_metrics=self.env_metrics,
            env_extras=self.request.row.env_extras,
            timing={"generate": self.generate_s, "env": self.env_s},
            n_attempts=self.attempt + 1,
        )


def _segments(rows: list[SegmentBuilder], places: list[Place], records: list[TurnRecord]) -> tuple[Segment, ...]:
    """Build the segments. A turn's reward is on its last token, or spread over its tokens as the environment did."""
    rewards = [[0.0] * row.response_length for row in rows]
    turns: list[list[Turn]] = [[] for _ in rows]
    for place, record in zip(places, records, strict=False):
        row_rewards, reward = rewards[place.row], record.reward
        if isinstance(reward, list) and len(reward) == place.end - place.start:
            for position, value in enumerate(reward, place.start):
                row_rewards[position] += value
        elif row_rewards:
            row_rewards[max(place.end, 1) - 1] += _total(reward)
        turns[place.row].append(
            Turn(
                start=place.start,
                end=place.end,
                prompt_length=record.prompt_length,
                reward=_total(reward),
                stop_reason=record.result.stop_reason,
                weight_spans=record.result.weight_spans,
            )
        )
    return tuple(
        row.build(row_rewards, row_turns) for row, row_rewards, row_turns in zip(rows, rewards, turns, strict=True)
    )


def _total(reward: float | list[float]) -> float:
    return sum(reward) if isinstance(reward, list) else reward
