"""Prompts, turns and trajectories, with token ids in lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from skyrl_train.media.spans import ImageSpan

T = TypeVar("T")

UNKNOWN_EXPERT = -1
"""Placeholder for an expert that was not recorded."""


class Message(TypedDict):
    """One chat message, e.g. `{"role": "user", "content": "What is 2 + 2?"}`.

    A content with images is a list of parts (`skyrl_gym.images`).
    """

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt dataset, e.g. a maths question and the answer its environment checks against."""

    uid: str  # "17": the row's index in the dataset
    prompt: list[Message]
    env_class: str | None  # None: the config's `environment.env_class`
    env_extras: dict[str, Any]  # every other column: reward_spec, data_source, extra_info, …

    @property
    def data_source(self) -> str:
        """Dataset of the row, to group metrics. "unknown" if the row does not name it."""
        return str(self.env_extras.get("data_source") or "unknown")


@dataclass(frozen=True, slots=True)
class DrawnPrompt(Generic[T]):
    """A row drawn from the dataset, in RL a `PromptRow`. If it is drawn again, it gets a new draw number."""

    draw: int  # number of the draw in this run
    row: T
    index: int  # index of the row in its dataset
    ends_epoch: bool = False  # True for the last prompt of its epoch


Phase = Literal["train", "eval"]


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """One sample of one drawn prompt: `TrajectoryID("17", 3, draw=4711)` is the fourth sample of draw 4711."""

    instance_id: str  # dataset row, for metrics and messages only
    repetition_id: int  # 0 … G-1, or G for the greedy sample
    draw: int = 0  # as in `DrawnPrompt`
    phase: Phase = "train"

    def to_string(self) -> str:
        """Return a name for messages and files, e.g. "17_3"."""
        return f"{self.instance_id}_{self.repetition_id}"


class WeightSpan(NamedTuple):
    """Consecutive tokens that were sampled with one version of the weights."""

    version: int
    n_tokens: int


@dataclass(slots=True)
class Turn:
    """One assistant turn: `response_ids[start:end]` of its segment, sampled from a prompt of `prompt_length` tokens."""

    start: int
    end: int
    prompt_length: int  # tokens of the engine's input for this turn, the first prompt included
    reward: float | list[float]  # total. A list of token rewards only while the rollout is in progress
    stop_reason: str  # from the engine: "stop", "length" or "abort"
    weight_spans: tuple[WeightSpan, ...] = ()
    segment: int = 0  # index of its segment in the trajectory


@dataclass(slots=True)
class Segment:
    """One row of tokens: a prompt, then sampled tokens (mask 1) and observations between them (mask 0, log-prob 0.0).

    Rewards are per token, so a turn's reward is on its last sampled token. A rollout in progress appends to segments
    and truncates them, but the segments of a trajectory do not change.
    """

    token_ids: list[int]  # [n_prompt + r]
    n_prompt: int
    loss_mask: list[int]  # [r], like the next three
    rewards: list[float]
    logprobs: list[float] | None = None  # in nats. None: the engine reported none, at least for one turn
    sampling_logprobs: list[float] | None = None  # of the truncated or penalized distribution. None: as `logprobs`
    turns: tuple[Turn, ...] = ()
    experts: np.ndarray | None = None
    """(n, layers, K) int16: the experts that the engine chose for the first n tokens, -1 where unknown."""
    images: list[ImageSpan] = field(default_factory=list)  # in order

    def __post_init__(self) -> None:
        n_tokens = len(self.token_ids) - self.n_prompt
        for name in ("loss_mask", "logprobs", "rewards", "sampling_logprobs"):
            values = getattr(self, name)
            assert values is None or len(values) == n_tokens, f"{name}: {len(values)} values, {n_tokens} tokens"

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.token_ids[: self.n_prompt]

    @property
    def response_ids(self) -> list[int]:
        """Token ids after the prompt [r]."""
        return self.token_ids[self.n_prompt :]

    @staticmethod
    def start(prompt_ids: list[int], images: Sequence[ImageSpan] = ()) -> Segment:
        """Return a segment with a prompt and no response yet."""
        return Segment(prompt_ids, len(prompt_ids), loss_mask=[], rewards=[], logprobs=[], images=list(images))

    @property
    def response_length(self) -> int:
        """Number of tokens after the prompt."""
        return len(self.loss_mask)

    def append_sampled(
        self, token_ids: list[int], logprobs: list[float] | None, sampling_logprobs: list[float] | None
    ) -> None:
        """Add sampled tokens. `sampling_logprobs=None` means that they equal `logprobs`."""
        n_tokens = len(token_ids)
        if sampling_logprobs is not None and self.sampling_logprobs is None:
            self.sampling_logprobs = list(self.logprobs or [0.0] * self.response_length)
        if self.sampling_logprobs is not None:
            self.sampling_logprobs += sampling_logprobs or logprobs or [0.0] * n_tokens
        if logprobs is None:
            self.logprobs = None
        elif self.logprobs is not None:
            self.logprobs += logprobs
        self.token_ids += token_ids
        self.loss_mask += [1] * n_tokens
        self.rewards += [0.0] * n_tokens

    def append_observed(self, token_ids: list[int], images: Sequence[ImageSpan] = ()) -> None:
        """Add the tokens of an observation, and its images."""
        self.images += [span.shift(len(self.token_ids)) for span in images]
        zeros = [0.0] * len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        for values in (self.rewards, self.logprobs, self.sampling_logprobs):
            if values is not None:
                values += zeros

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the response."""
        del self.token_ids[self.n_prompt + length :]
        for values in (self.loss_mask, self.rewards, self.logprobs, self.sampling_logprobs):
            if values is not None:
                del values[length:]
        self.images = [span for span in self.images if span.end <= self.n_prompt + length]
        if self.experts is not None:
            self.experts = self.experts[: self.n_prompt + length]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout, from the prompt to the last sampled token.

    Most trajectories have one segment. If the history of a conversation is rewritten, each version of the history is a
    segment, and all segments share the trajectory's reward and advantage. `prompt_ids`, `response_ids`, `loss_mask`,
    `rewards` and `logprobs` refer to the last segment.

    A trajectory with an `error` is *invalid*: no baseline, metric or loss reads its rewards.
    """

    id: TrajectoryID
    env_class: str
    data_source: str
    segments: tuple[Segment, ...]
    stop_reason: str  # from the last turn, or "length", "max_turns", "env_error", …
    error: str | None = None  # if set, the trajectory is invalid
    reward_components: dict[str, float] = field(default_factory=dict)  # totals by name, if reported
    greedy_reward: float | None = None  # total reward of a greedy rollout of the prompt, if any
    env_metrics: dict[str, Any] = field(default_factory=dict)
    env_extras: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)  # seconds: "generate", "env"
    n_attempts: int = 1  # rollouts until one was valid, or until the retries ran out

    def __post_init__(self) -> None:
        assert self.segments, f"trajectory {self.id} has no segment"

    @property
    def is_valid(self) -> bool:
        """True unless there is an error."""
        return self.error is None

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt of the last segment."""
        return self.segments[-1].prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """Response of the last segment [r]."""
        return self.segments[-1].response_ids

    @property
    def loss_mask(self) -> list[int]:
        """1 on the sampled tokens of the last segment [r]."""
        return self.segments[-1].loss_mask

    @property
    def logprobs(self) -> list[float] | None:
        """Log-probs of the last segment from the engine [r]."""
        return self.segments[-1].logprobs

    @property
    def rewards(self) -> list[float] | None:
        """Rewards of the last segment's tokens [r], or None if the trajectory is invalid."""
        return self.segments[-1].rewards if self.is_valid else None

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns of all segments, in order."""
        return tuple(turn for segment in self.segments for turn in segment.turns)

    @property
    def total_reward(self) -> float:
        """Sum of all rewards of all segments, for valid trajectories only."""
        assert self.is_valid, f"trajectory {self.id} is invalid: {self.error}"
        return sum(sum(segment.rewards) for segment in self.segments)

    @property
    def last_stop_reason(self) -> str:
        """Stop reason of the last turn, or of the trajectory if its turns are unknown."""
        turns = self.turns
        return turns[-1].stop_reason if turns else self.stop_reason

    @property
    def n_response_tokens(self) -> int:
        """Number of tokens after the prompt, in all segments."""
        return sum(len(segment.loss_mask) for segment in self.segments)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all segments, with prompts."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def weight_versions(self) -> list[int]:
        """Versions of the weights that sampled the trajectory, ascending."""
        return sorted({span.version for turn in self.turns for span in turn.weight_spans})


def last_sampled(loss_mask: Sequence[int], end: int | None = None) -> int:
    """Return the index of the last sampled token before `end`, by default in all of the mask [r].

    If there is none before `end`, return the first sampled token after it. If no token was sampled, return the last
    token before `end`, or -1 without tokens.

    >>> last_sampled([1, 1, 0, 1, 0]), last_sampled([1, 1, 0, 1, 0], end=3), last_sampled([0, 0, 1], end=2)
    (3, 1, 2)
    """
    end = len(loss_mask) if end is None else end
    for position in (*range(end - 1, -1, -1), *range(end, len(loss_mask))):
        if loss_mask[position]:
            return position
    return max(end, 1) - 1 if loss_mask else -1


def all_or_none(values: Sequence[T | None]) -> list[T] | None:
    """Return the values as a list, or None if any is None."""
    present = [value for value in values if value is not None]
    return present if len(present) == len(values) else None
