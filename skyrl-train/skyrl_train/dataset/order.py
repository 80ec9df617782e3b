"""The order of training prompts."""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from skyrl_train.dataset.files import check_row_count
from skyrl_train.errors import DataError, InvalidRow, SkippedRow
from skyrl_train.types import DrawnPrompt

logger = logging.getLogger(__name__)

R = TypeVar("R")
RowType = TypeVar("RowType", covariant=True)

EPOCHS_PER_SEED = 1_000_003  # keeps epoch 1 of seed s distinct from epoch 0 of seed s + 1


class Dataset(Protocol[RowType]):
    """Rows to draw."""

    @property
    def fingerprint(self) -> str:
        """A hash of all rows in their order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RowType:
        """Return a row. SkippedRow if it cannot be used and the next row should be drawn instead."""


class EpochOrder:
    """The shuffled order of rows in each epoch. Only the latest epoch's order is cached."""

    def __init__(self, n_rows: int, seed_of: Callable[[int], int]) -> None:
        """Create the orders of `n_rows` rows. `seed_of` maps an epoch's index to its seed."""
        self._n_rows = n_rows
        self._seed_of = seed_of
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, epoch: int) -> torch.Tensor:
        """Return the row indices (n_rows) in the order of an epoch."""
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed_of(epoch))
            self._epoch, self._order = epoch, torch.randperm(self._n_rows, generator=generator)
        return self._order


class PromptOrder(ABC, Generic[R]):
    """Batches of rows, epoch after epoch. The order depends on data, batch size and seed, in mixtures also on weights.

    Drawn rows are numbered. `state_dict` is the position after the last batch, so an order that loads it continues
    from there, starting with prompts that were drawn but not trained on.
    """

    def __init__(self, dataset: Dataset[R], batch_size: int, seed: int) -> None:
        """Start at the first row. DataError if the dataset does not fill one batch."""
        check_row_count(len(dataset), batch_size)
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._n_drawn = 0  # rows, over all epochs
        self._n_skipped = 0
        self._unused: deque[DrawnPrompt[R]] = deque()  # drawn for later batches, or untrained before a resume
        self._warned: set[int] = set()

    @property
    def batches_per_epoch(self) -> int:
        """Number of full batches in the dataset."""
        return len(self._dataset) // self._batch_size

    @property
    def metrics(self) -> dict[str, float]:
        """`data/n_skipped`, the number of drawn rows that could not be used. Empty if there are none."""
        return {"data/n_skipped": float(self._n_skipped)} if self._n_skipped else {}

    @property
    @abstractmethod
    def n_finished_epochs(self) -> int:
        """Number of finished epochs, i.e. epochs without a full batch left."""

    def next_batch(self) -> list[DrawnPrompt[R]]:
        """Draw the next batch, first from the unused prompts of `load_state_dict`, then from the data.

        After the last batch of an epoch, the next epoch starts. An error leaves the position unchanged.
        """
        if len(self._unused) < self._batch_size:
            position, n_skipped, n_finished_epochs = self._position(), self._n_skipped, self.n_finished_epochs
            try:
                rows = self._next_rows()
            except BaseException:
                self._load(position)
                self._n_skipped = n_skipped
                raise
            ends_epoch = self.n_finished_epochs > n_finished_epochs
            self._unused += [
                DrawnPrompt(self._n_drawn + i, row, index, ends_epoch and i == len(rows) - 1)
                for i, (index, row) in enumerate(rows)
            ]
            self._n_drawn += len(rows)
        return [self._unused.popleft() for _ in range(self._batch_size)]

    def state_dict(self, unused: Sequence[DrawnPrompt[R]] = ()) -> dict[str, Any]:
        """Return the position and the identity of the data.

        `unused` prompts were drawn but not trained on. `load_state_dict` puts them first.
        """
        counts = {"n_drawn": self._n_drawn, "n_skipped": self._n_skipped}
        numbers = [(prompt.draw, prompt.index, prompt.ends_epoch) for prompt in (*unused, *self._unused)]
        return {**self._position(), **counts, "unused": numbers, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. The batch size may differ, but not the data or the seed (DataError)."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise DataError(
                    f"the checkpoint was made with {name}={state[name]}, but this run has {name}={value}; resume with "
                    "the same data, data.max_checked_rows and seed, or start a new run with another trainer.run_name "
                    "and trainer.resume_mode=none"
                )
        self._load(state)
        self._n_drawn, self._n_skipped = state["n_drawn"], state.get("n_skipped", 0)
        self._unused.clear()
        for draw, index, ends_epoch in state.get("unused", ()):
            if (row := self._find(index)) is not None:
                self._unused.append(DrawnPrompt(draw, row, index, ends_epoch))
            elif ends_epoch and self._unused:
                self._unused.append(replace(self._unused.pop(), ends_epoch=True))

    def _find(self, index: int) -> R | None:
        """Return a row, or None if it cannot be used. Warn once about each invalid row."""
        try:
            return self._dataset[index]
        except SkippedRow as skipped:
            if isinstance(skipped, InvalidRow) and index not in self._warned:
                self._warned.add(index)
                logger.warning("Skipped: %s", skipped)
            self._n_skipped += 1
            return None

    @abstractmethod
    def _next_rows(self) -> list[tuple[int, R]]:
        """Return (dataset index, row) for each row of the next batch."""

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return the position as a dict for `_load`."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Restore the position from `state`."""

    def _identity(self) -> dict[str, Any]:
        return {"n_rows": len(self._dataset), "fingerprint": self._dataset.fingerprint, "seed": self._seed}


class ShuffledPrompts(PromptOrder[R]):
    """All rows, reshuffled for each epoch. An incomplete last batch is dropped."""

    def __init__(self, dataset: Dataset[R], batch_size: int, seed: int) -> None:
        super().__init__(dataset, batch_size, seed)
        self._epoch = 0
        self._row = 0  # start of the next batch in the epoch's order
        self._order = EpochOrder(len(dataset), lambda epoch: (seed * EPOCHS_PER_SEED + epoch) % 2**63)

    @property
    def n_finished_epochs(self) -> int:
        return self._epoch + (not self._is_enough(self._batch_size))

    def _is_enough(self, n_rows: int) -> bool:
        return self._row + n_rows <= len(self._dataset)

    def _next_rows(self) -> list[tuple[int, R]]:
        rows: list[tuple[int, R]] = []
        first_epoch = self._epoch
        while (n_missing := self._batch_size - len(rows)) > 0:
            if not self._is_enough(n_missing):
                if self._epoch > first_epoch:
                    raise DataError(
                        f"fewer than {self._batch_size} rows of data.train_data can be used: all others are invalid "
                        "(see the warnings above) or too long (without a warning); correct them, or raise the limit"
                    )
                self._epoch, self._row, rows = self._epoch + 1, 0, []
            index = int(self._order(self._epoch)[self._row])
            self._row += 1
            if (row := self._find(index)) is not None:
                rows.append((index, row))
        return rows

    def _position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def _load(self, state: dict[str, Any]) -> None:
        if "epoch" not in state:
            raise DataError(
                "the checkpoint was saved with data.mixture, but this run has none; set it, or start a new run with "
                "another trainer.run_name"
            )
        self._epoch, self._row = state["epoch"], state["row"]
