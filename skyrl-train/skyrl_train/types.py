"""The nouns every room speaks: trajectories from rollouts, and the batch the trainer learns from.

Letters: P prompts in a step, G samples per prompt, B trajectories, L sequence length, R response length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch

T = TypeVar("T")


class Message(TypedDict):
    """One chat message, e.g. `{"role": "user", "content": "What is 2 + 2?"}`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a prompt dataset, e.g. a maths question and the answer its environment checks against."""

    uid: str  # "17": the row's number in the dataset; groups the samples of one prompt
    prompt: list[Message]
    env_class: str | None  # None: the config's `environment.env_class`
    env_extras: dict[str, Any]  # every other column: reward_spec, data_source, extra_info, …

    @property
    def data_source(self) -> str:
        """Where the row comes from, for grouping metrics; "unknown" when the dataset does not say."""
        return str(self.env_extras.get("data_source") or "unknown")


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Which sample of which prompt: `TrajectoryID("17", 3)` is the fourth sample of row 17."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """The session id of this rollout, e.g. "17_3"."""
        return f"{self.instance_id}_{self.repetition_id}"


class WeightSpan(NamedTuple):
    """`n_tokens` in a row were sampled with the weights of one version."""

    version: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn: `response_ids[start:end]` was sampled from a prompt of `prompt_length` tokens."""

    start: int
    end: int
    prompt_length: int  # tokens the engine was given for this turn, the first prompt included
    reward: float
    stop_reason: str  # the engine's: "stop", "length" or "abort"
    segment: int = 0  # of the trajectory: which of its rows the turn is in
    weight_spans: tuple[WeightSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens in one row that end before the last turn: what came after it does not begin with them.

    The fields are those of `Trajectory`, of whose last row it is an earlier one.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    rewards: list[float]
    sampling_logprobs: list[float] | None = None

    def __post_init__(self) -> None:
        _check_lengths(self)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One rollout, from the prompt to the last sampled token.

    `response_ids` [r] holds everything after the prompt: sampled tokens (mask 1) and observations in between
    (mask 0, log-prob 0.0). `rewards` [r] are per token, each turn's on its last sampled token; None marks an
    *invalid* trajectory, which no baseline, metric or loss reads.

    A conversation whose history was rewritten between two turns is no single row of tokens: `earlier` holds the rows
    before the last one. They share the trajectory's reward and advantage.
    """

    id: TrajectoryID
    env_class: str
    data_source: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None  # None: the engine did not report them
    rewards: list[float] | None
    stop_reason: str  # why it ended: its last turn's, or a limit's ("length", "max_turns"), or "env_error", …
    turns: tuple[Turn, ...] = ()
    reward_components: dict[str, float] = field(default_factory=dict)  # totals by name, where the environment says
    greedy_reward: float | None = None  # total reward of a greedy rollout of the same prompt, where one was played
    env_metrics: dict[str, Any] = field(default_factory=dict)
    env_extras: dict[str, Any] = field(default_factory=dict)
    earlier: tuple[Segment, ...] = ()
    sampling_logprobs: list[float] | None = None  # [r] of the truncated or penalised distribution that was sampled from
    timing: dict[str, float] = field(default_factory=dict)  # seconds: "generate", "env"
    n_attempts: int = 1  # how often it was played until it was valid, or given up
    error: str | None = None  # what made it invalid

    def __post_init__(self) -> None:
        _check_lengths(self)

    @property
    def is_valid(self) -> bool:
        """Whether its rewards may be read."""
        return self.rewards is not None

    @property
    def valid_rewards(self) -> list[float]:
        """The rewards of a valid trajectory [r]."""
        assert self.rewards is not None, f"trajectory {self.id} is invalid: {self.error}"
        return self.rewards

    @property
    def total_reward(self) -> float:
        """Sum of all rewards, those of earlier rows included; only valid trajectories have one."""
        return sum(self.valid_rewards) + sum(sum(segment.rewards) for segment in self.earlier)

    @property
    def last_stop_reason(self) -> str:
        """Why its last turn ended; where turns are not known, why the trajectory did."""
        return self.turns[-1].stop_reason if self.turns else self.stop_reason

    @property
    def n_response_tokens(self) -> int:
        """Tokens after the prompt, in all rows."""
        return len(self.response_ids) + sum(len(segment.response_ids) for segment in self.earlier)

    @property
    def rows(self) -> tuple[Segment | Trajectory, ...]:
        """Every row to learn from; the trajectory itself is the last."""
        return (*self.earlier, self)

    @property
    def weight_versions(self) -> list[int]:
        """The versions of the weights that sampled it, ascending."""
        return sorted({span.version for turn in self.turns for span in turn.weight_spans})


def last_sampled(loss_mask: Sequence[int]) -> int:
    """The position of the last sampled token [r]; of the last token where none was sampled, -1 where there is none."""
    last = len(loss_mask) - 1
    return next((position for position in range(last, -1, -1) if loss_mask[position]), last)


def _check_lengths(row: Segment | Trajectory) -> None:
    n_tokens = len(row.response_ids)
    for name in ("loss_mask", "logprobs", "rewards", "sampling_logprobs"):
        values = getattr(row, name)
        assert values is None or len(values) == n_tokens, f"{name}: {len(values)} values, {n_tokens} tokens"


@dataclass(slots=True)
class TrainingBatch:
    """B trajectories as tensors. Prompts are padded left, responses right: every response starts at column L - R.

    Tensors that are None have not been computed yet. Rows of one prompt stand together, in the order of `uids`.
    """

    sequences: torch.Tensor  # (B, L) int64
    attention_mask: torch.Tensor  # (B, L) int64, 1 on tokens, 0 on padding
    loss_mask: torch.Tensor  # (B, R) float, 1 on sampled tokens
    rewards: torch.Tensor  # (B, R) float
    uids: list[str]  # [B] the prompt each row answers
    rollout_logprobs: torch.Tensor | None = None  # (B, R) float, of the engine
    old_logprobs: torch.Tensor | None = None  # (B, R) of the policy at the start of the update
    ref_logprobs: torch.Tensor | None = None  # (B, R)
    entropies: torch.Tensor | None = None  # (B, R) at the start of the update, of each token's distribution
    sum_pi_squared: torch.Tensor | None = None  # (B, R) likewise, Σ_v π(v)²
    values: torch.Tensor | None = None  # (B, R) of the critic at the start of the update
    advantages: torch.Tensor | None = None  # (B, R)
    returns: torch.Tensor | None = None  # (B, R)
    greedy_rewards: torch.Tensor | None = None  # (B,) total reward of a greedy rollout of each row's prompt
    is_last_row: torch.Tensor | None = None  # (B,) of its trajectory, which ends there; None: all are
    reward_components: dict[str, torch.Tensor] = field(default_factory=dict)  # (B,) each, totals by name

    def __post_init__(self) -> None:
        n_rows, length = self.sequences.shape
        response_length = self.loss_mask.shape[1]
        assert len(self.uids) == n_rows, f"{len(self.uids)} uids for {n_rows} rows"
        assert response_length <= length, f"responses of {response_length} tokens in sequences of {length}"
        shapes = {
            "sequences": (n_rows, length),
            "attention_mask": (n_rows, length),
            "greedy_rewards": (n_rows,),
            "is_last_row": (n_rows,),
        }
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            shape = shapes.get(name, (n_rows, response_length))
            assert tensor is None or tensor.shape == shape, f"{name}: {tuple(tensor.shape)}"
        for name, tensor in self.reward_components.items():
            assert tensor.shape == (n_rows,), f"reward_components[{name!r}]: {tuple(tensor.shape)}"

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def response_length(self) -> int:
        """R, the longest response of the batch in tokens."""
        return self.loss_mask.shape[1]

    @property
    def n_prompts(self) -> int:
        """Prompts that the rows answer."""
        return len(self._starts())

    def _starts(self) -> list[int]:
        """The first row of each prompt."""
        return [row for row, uid in enumerate(self.uids) if row == 0 or uid != self.uids[row - 1]]

    def select(self, rows: Sequence[int]) -> TrainingBatch:
        """The given rows, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return self._map(lambda tensor: tensor[index.to(tensor.device)], uids=[self.uids[row] for row in rows])

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch on another device."""
        return self._map(lambda tensor: tensor.to(device), uids=self.uids)

    def chunk(self, n_prompts: int) -> list[TrainingBatch]:
        """Consecutive batches of `n_prompts` prompts each (the last may hold fewer), whatever rows a prompt has.

        Their tensors are views of this one's.
        """
        edges = [*self._starts()[::n_prompts], len(self)]
        return [self._slice(start, end) for start, end in pairwise(edges)]

    def _slice(self, start: int, end: int) -> TrainingBatch:
        return self._map(lambda tensor: tensor[start:end], uids=self.uids[start:end])

    @staticmethod
    def cat(batches: Sequence[TrainingBatch]) -> TrainingBatch:
        """Join batches of the same L and R row by row."""
        joined: dict[str, Any] = {}
        for name in TENSOR_FIELDS:
            parts = [getattr(batch, name) for batch in batches]
            n_computed = sum(part is not None for part in parts)
            assert n_computed in (0, len(parts)), f"{name} is there in {n_computed} of {len(parts)} batches"
            joined[name] = torch.cat(parts) if n_computed else None
        names = {name for batch in batches for name in batch.reward_components}
        components = {name: torch.cat([batch.reward_components[name] for batch in batches]) for name in names}
        uids = [uid for batch in batches for uid in batch.uids]
        return TrainingBatch(**joined, uids=uids, reward_components=components)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor], uids: list[str]) -> TrainingBatch:
        components = {name: function(tensor) for name, tensor in self.reward_components.items()}
        mapped: dict[str, Any] = {"uids": uids, "reward_components": components}
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            mapped[name] = None if tensor is None else function(tensor)
        return replace(self, **mapped)


def all_or_none(values: Sequence[T | None]) -> list[T] | None:
    """The values as a list, or None when one of them is missing."""
    there = [value for value in values if value is not None]
    return there if len(there) == len(values) else None


TENSOR_FIELDS = tuple(f.name for f in fields(TrainingBatch) if f.name not in ("uids", "reward_components"))
TrainingInputBatch = TrainingBatch
