"""A rollout in the making, and the trajectory that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.generators.base import RolloutRequest
from skyrl_train.generators.conversation import Place, Row, TokenConversation
from skyrl_train.generators.episodes import Episode
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import Segment, Trajectory, Turn


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
    seed: int
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
        """What the trainer sees: the response ends with the last sampled token."""
        assert self.stop_reason is not None
        rows, places = [Row([], 0)], list[Place]()
        if self.conversation is not None:
            self.conversation.finish()
            rows, places = self.conversation.rows, self.conversation.places
        if places and not rows[-1].response_length:
            self.fail("empty_response", "the environment left nothing of the reply, which its reward could be for")
        rewards = _rewards(rows, places, self.turns)
        last = rows[-1]
        return Trajectory(
            id=self.request.id,
            env_class=self.env_class,
            data_source=self.request.row.data_source,
            prompt_ids=last.token_ids[: last.n_prompt],
            response_ids=last.token_ids[last.n_prompt :],
            loss_mask=last.loss_mask,
            logprobs=last.logprobs,
            sampling_logprobs=last.sampling_logprobs,
            rewards=rewards[-1] if self.error is None else None,
            stop_reason=self.stop_reason,
            turns=tuple(_turn(place, record) for place, record in zip(places, self.turns, strict=False)),
            reward_components=self.reward_components,
            env_metrics=self.env_metrics,
            env_extras=self.request.row.env_extras,
            earlier=tuple(_segment(row, values) for row, values in zip(rows[:-1], rewards, strict=False)),
            timing={"generate": self.generate_s, "env": self.env_s},
            n_attempts=self.attempt + 1,
            error=self.error,
        )


def _segment(row: Row, rewards: list[float]) -> Segment:
    return Segment(
        prompt_ids=row.token_ids[: row.n_prompt],
        response_ids=row.token_ids[row.n_prompt :],
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        rewards=rewards,
        sampling_logprobs=row.sampling_logprobs,
    )


def _turn(place: Place, record: TurnRecord) -> Turn:
    return Turn(
        start=place.start,
        end=place.end,
        prompt_length=record.prompt_length,
        reward=_total(record.reward),
        stop_reason=record.result.stop_reason,
        segment=place.row,
        weight_spans=record.result.weight_spans,
    )


def _rewards(rows: list[Row], places: list[Place], turns: list[TurnRecord]) -> list[list[float]]:
    """Rewards of every token, row by row: that of a turn is on its last token, or spread as the environment did."""
    rewards = [[0.0] * row.response_length for row in rows]
    for place, record in zip(places, turns, strict=False):
        of_row = rewards[place.row]
        if isinstance(record.reward, list) and len(record.reward) == place.end - place.start:
            for position, value in enumerate(record.reward, place.start):
                of_row[position] += value
        elif of_row:
            of_row[max(place.end, 1) - 1] += _total(record.reward)
    return rewards


def _total(reward: float | list[float]) -> float:
    return sum(reward) if isinstance(reward, list) else reward
