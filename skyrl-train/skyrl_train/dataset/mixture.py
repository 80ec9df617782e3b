"""Batches with a fixed fraction of prompts from each data source."""

import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from skyrl_train.dataset.order import EpochOrder, PromptOrder
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.types import PromptRow

MIXTURE = "data.mixture"


class MixedPrompts(PromptOrder[PromptRow]):
    """Batches with a fixed share of prompts from each data source, regardless of its size.

    Each source is shuffled separately, epoch after epoch. Fractions of a prompt carry over to later batches: with
    weights 0.7 and 0.3 and batches of 4, a source gets 3, 3, 2, … and 1, 1, 2, … prompts. An epoch of the mixture is as
    many batches as the whole dataset fills.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        seed: int,
        weights: Mapping[str, float],
        min_per_batch: int = 0,
        *,
        resumes_weights: bool = False,
    ) -> None:
        """Start with the first batch.

        Args:
            weights: relative weight of each data source. If empty, the number of rows.
            min_per_batch: minimum number of prompts of each source in every batch.
            resumes_weights: let `load_state_dict` also restore the weights, because a curriculum changes them.

        Raises:
            DataError: the dataset does not fill one batch.
            ConfigError: the weights are invalid, or `min_per_batch` prompts of each source do not fit into a batch.
        """
        super().__init__(dataset, batch_size, seed)
        rows: dict[str, array[int]] = {}
        for i, name in enumerate(dataset.data_sources()):
            rows.setdefault(name, array("q")).append(i)
        self._streams = {name: _Stream(name, rows[name], seed, self._find) for name in sorted(rows)}
        self._min_per_batch = min_per_batch
        self._resumes_weights = resumes_weights
        self._n_batches = 0
        self._credits = dict.fromkeys(self._streams, 0.0)  # prompts owed to each source
        self.set_weights(weights or {name: len(numbers) for name, numbers in rows.items()})

    @property
    def weights(self) -> dict[str, float]:
        """Fraction of each source in a batch. The fractions add up to 1."""
        return dict(self._weights)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights for the next batch and all later ones. A source with weight 0 is left out.

        Raise ConfigError if a weight is missing, negative, NaN or infinite, all are 0, or a source is unknown.
        """
        known = ", ".join(self._streams)
        if unknown := sorted(weights.keys() - self._streams.keys()):
            raise ConfigError(f"{MIXTURE}.weights lists {', '.join(unknown)}, but the data sources are: {known}")
        if missing := sorted(self._streams.keys() - weights.keys()):
            raise ConfigError(
                f"{MIXTURE}.weights has no weight for {', '.join(missing)}; set 0 to exclude a data source"
            )
        for name, weight in weights.items():
            if not (isinstance(weight, int | float) and math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"{MIXTURE}.weights.{name}={weight!r} must be a number of at least 0")
        if not any(weights.values()):
            raise ConfigError(f"{MIXTURE}.weights are all 0; at least one of {known} must have more")
        total = sum(weights.values())
        self._weights = {name: weights[name] / total for name in self._streams}
        n_used = sum(weight > 0 for weight in self._weights.values())
        if self._min_per_batch * n_used > self._batch_size:
            raise ConfigError(
                f"{MIXTURE}.min_per_batch={self._min_per_batch} of each of {n_used} data sources is more than "
                f"trainer.train_batch_size={self._batch_size}; lower the one or raise the other"
            )

    @property
    def n_finished_epochs(self) -> int:
        """Number of finished epochs of the mixture."""
        return self._n_batches // self.batches_per_epoch

    def _next_rows(self) -> list[tuple[int, PromptRow]]:
        chosen = [row for name, n in self._shares().items() for row in self._streams[name].take(n)]
        generator = torch.Generator().manual_seed(_seed(self._seed, "batch", self._n_batches))
        order = torch.randperm(len(chosen), generator=generator)
        self._n_batches += 1
        return [chosen[i] for i in order.tolist()]

    def _shares(self) -> dict[str, int]:
        """Return each source's number of prompts in the next batch, and update its credit.

        A source earns batch size × weight credits per batch and pays 1 per prompt. First, each source gets as many
        prompts as it has whole credits, but at least `min_per_batch`. Then prompts are added to the sources with the
        most credit left, or taken from the sources with the least, until the batch has its size.
        """
        used = [name for name, weight in self._weights.items() if weight > 0]
        for name in used:
            self._credits[name] += self._batch_size * self._weights[name]
        shares = {name: max(self._min_per_batch, math.floor(self._credits[name])) for name in used}
        while (n_missing := self._batch_size - sum(shares.values())) != 0:
            step = 1 if n_missing > 0 else -1
            movable = [name for name in used if step > 0 or shares[name] > self._min_per_batch]
            most_owed = max(movable, key=lambda name: step * (self._credits[name] - shares[name]))
            shares[most_owed] += step
        for name in used:  # limit the credit: a deviation forced by min_per_batch must not accumulate
            self._credits[name] = max(-1.0, min(1.0, self._credits[name] - shares[name]))
        return shares

    def _position(self) -> dict[str, Any]:
        return {
            "n_batches": self._n_batches,
            "streams": {name: stream.position for name, stream in self._streams.items()},
            "credits": dict(self._credits),
            "weights": dict(self._weights),
        }

    def _load(self, state: dict[str, Any]) -> None:
        if "streams" not in state:
            raise DataError(
                f"the checkpoint was made without {MIXTURE}, but this run has one; remove it, or start a new run with "
                "another trainer.run_name"
            )
        self._n_batches = state["n_batches"]
        self._credits = dict(state["credits"])
        for name, position in state["streams"].items():
            self._streams[name].position = position
        if self._resumes_weights:
            self._weights = dict(state["weights"])


class _Stream:
    """The rows of one source, reshuffled for each epoch."""

    def __init__(self, name: str, indices: Sequence[int], seed: int, find: Callable[[int], PromptRow | None]) -> None:
        self._name = name
        self._indices = indices
        self._find = find
        self._order = EpochOrder(len(indices), lambda epoch: _seed(seed, name, epoch))
        self.position = (0, 0)  # epoch, index in its order

    def take(self, n: int) -> list[tuple[int, PromptRow]]:
        """Return (index, row) of the next n rows, across epochs if necessary. DataError if no row can be used."""
        epoch, row = self.position
        taken: list[tuple[int, PromptRow]] = []
        n_failures = 0  # in a row
        while len(taken) < n:
            if n_failures == len(self._indices):
                raise DataError(
                    f"no row of the data source {self._name} can be used: all are invalid (see the warnings above) or "
                    "too long (without a warning); correct them, or raise trainer.max_prompt_length"
                )
            index = self._indices[int(self._order(epoch)[row])]
            if (found := self._find(index)) is not None:
                taken.append((index, found))
            n_failures = 0 if found is not None else n_failures + 1
            epoch, row = (epoch, row + 1) if row + 1 < len(self._indices) else (epoch + 1, 0)
        self.position = (epoch, row)
        return taken


def _seed(seed: int, name: str, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{number}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")
