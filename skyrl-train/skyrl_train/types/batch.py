"""Rows of tokens as tensors, and the shard of them that one rank processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

from skyrl_train.lazy import torch
from skyrl_train.media.spans import Spans


@dataclass(slots=True)
class TrainingBatch:
    """B rows as tensors. Prompts are padded left, responses right, so every response starts at column L - R.

    With L = 6 and R = 3, the prompts `1 2` and `1 2 3` with the responses `7 8` and `7 8 9` are

        sequences       . 1 2 7 8 .      attention_mask   0 1 1 1 1 0      loss_mask   1 1 0
                        1 2 3 7 8 9                       1 1 1 1 1 1                  1 1 1

    Only the first four fields are always set. Other fields are None until they are computed, and stay None if the run
    does not need them. Rows of a draw are adjacent, as are rows of a trajectory.
    """

    sequences: torch.Tensor  # (B, L) int64
    attention_mask: torch.Tensor  # (B, L) int64, 1 on tokens, 0 on padding
    loss_mask: torch.Tensor  # (B, R) float, 1 on trained tokens
    draws: torch.Tensor  # (B,) int64, equal for rows that answer the same drawn prompt
    trajectories: torch.Tensor | None = None  # (B,) int64, equal for rows of one trajectory. None: one row each
    rewards: torch.Tensor | None = None  # (B, R) float
    rollout_logprobs: torch.Tensor | None = None  # (B, R) float, from the engine
    versions: torch.Tensor | None = None  # (B, R) int32, version of the weights that sampled a token, -1 elsewhere
    old_logprobs: torch.Tensor | None = None  # (B, R) of the policy at the start of the update
    ref_logprobs: torch.Tensor | None = None  # (B, R)
    entropies: torch.Tensor | None = None  # (B, R) of each token's distribution, at the start of the update
    sum_pi_squared: torch.Tensor | None = None  # (B, R) Σ_v π(v)² of the same distribution
    values: torch.Tensor | None = None  # (B, R) of the critic at the start of the update
    advantages: torch.Tensor | None = None  # (B, R)
    returns: torch.Tensor | None = None  # (B, R)
    greedy_rewards: torch.Tensor | None = None  # (B,) total reward of a greedy rollout of each row's prompt
    loss_weights: torch.Tensor | None = None  # (B, R), Σ weights · loss is the loss of the whole mini-batch
    sequence_weights: torch.Tensor | None = None  # (B, R), the same for terms in which every trajectory counts equally
    experts: torch.Tensor | None = None  # (B, L, layers, K) int16 that computed a token in the engine, -1 if unknown
    logprob_gradient: torch.Tensor | None = None  # (B, R) gradient of a whole batch's loss in log-probs or values
    reward_components: dict[str, torch.Tensor] = field(default_factory=dict)  # (B,) each, totals by name
    images: list[Spans] | None = None  # B, positions count a row's tokens without padding. None: no row has images

    def __post_init__(self) -> None:
        n_rows, length = self.sequences.shape
        response_length = self.loss_mask.shape[1]
        assert response_length <= length, f"responses of {response_length} tokens in sequences of {length}"
        per_token = (n_rows, response_length)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("sequences", "attention_mask"), (n_rows, length))
        shapes |= dict.fromkeys(("draws", "trajectories", "greedy_rewards"), (n_rows,))
        if self.experts is not None:
            shapes["experts"] = (n_rows, length, *self.experts.shape[2:])
        for name in TENSOR_FIELDS:
            tensor = getattr(self, name)
            assert tensor is None or tensor.shape == shapes.get(name, per_token), f"{name}: {tuple(tensor.shape)}"
        for name, tensor in self.reward_components.items():
            assert tensor.shape == (n_rows,), f"reward_components[{name!r}]: {tuple(tensor.shape)}"
        assert self.images is None or len(self.images) == n_rows, f"images of {len(self.images)} rows"

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_length(self) -> int:
        """R, the length of the longest response in tokens."""
        return self.loss_mask.shape[1]

    @property
    def n_prompts(self) -> int:
        """Number of drawn prompts that the rows answer."""
        return len(self._starts())

    @property
    def is_last_row(self) -> torch.Tensor:
        """True on the last row of each trajectory (B,)."""
        is_last = torch.ones(len(self), dtype=torch.bool, device=self.sequences.device)
        if self.trajectories is not None:
            is_last[:-1] = self.trajectories[1:] != self.trajectories[:-1]
        return is_last

    def _starts(self) -> list[int]:
        """Return the first row of each draw."""
        draws = self.draws.tolist()
        return [row for row, draw in enumerate(draws) if row == 0 or draw != draws[row - 1]]

    def select(self, rows: Sequence[int] | torch.Tensor) -> TrainingBatch:
        """Return the given rows, in the given order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return self._map(lambda tensor: tensor[index.to(tensor.device)], index.tolist())

    def to(self, device: torch.device | str) -> TrainingBatch:
        """Return the batch on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def chunk(self, n_prompts: int) -> list[TrainingBatch]:
        """Split into consecutive batches of `n_prompts` drawn prompts (the last may have fewer), as views."""

        def part(start: int, end: int) -> TrainingBatch:
            return self._map(lambda tensor: tensor[start:end], range(start, end))

        return [part(start, end) for start, end in pairwise([*self._starts()[::n_prompts], len(self)])]

    def _map(
        self, function: Callable[[torch.Tensor], torch.Tensor], rows: Sequence[int] | None = None
    ) -> TrainingBatch:
        """Apply a function to all tensors. It returns `rows`, or all rows."""
        mapped: dict[str, Any] = {
            name: function(tensor) for name in TENSOR_FIELDS if (tensor := getattr(self, name)) is not None
        }
        components = {name: function(tensor) for name, tensor in self.reward_components.items()}
        if self.images is not None and rows is not None:
            mapped["images"] = [self.images[row] for row in rows]
        return replace(self, **mapped, reward_components=components)


TENSOR_FIELDS = tuple(f.name for f in fields(TrainingBatch) if f.name not in ("reward_components", "images"))


@dataclass(slots=True)
class Shard:
    """The part of a batch that one data-parallel rank processes."""

    rows: TrainingBatch  # (b, L), the rank's own rows, then fillers with loss mask 0
    micro_batches: list[list[int]]  # rows of each pass, in equally many passes on every rank


class TokenScores(NamedTuple):
    """A language model's scores of chosen tokens, each (B, R) and 0 elsewhere, or (N,)."""

    logprobs: torch.Tensor
    entropy: torch.Tensor  # of the distribution that the token came from, in nats
    sum_pi_squared: torch.Tensor  # Σ_v π(v)² of it, detached (may be 0 in a pass that records gradients)


class ValueScores(NamedTuple):
    """A critic's or reward model's values of the states before the chosen tokens, 0 elsewhere."""

    values: torch.Tensor  # (B, R)


Scores = TokenScores | ValueScores
