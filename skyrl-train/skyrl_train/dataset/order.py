"""The order in which prompts are drawn for training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch

from skyrl_train.errors import DataError
from skyrl_train.types import DrawnPrompt

R = TypeVar("R")
RowType = TypeVar("RowType", covariant=True)

EPOCHS_PER_SEED = 1_000_003  # the second epoch of one seed is not the first of the next


class Dataset(Protocol[RowType]):
    """Rows to draw."""

    @property
    def fingerprint(self) -> str:
        """A hash of all rows in their order."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RowType: ...


class PromptOrder(ABC, Generic[R]):
    """Batches of rows, epoch after epoch, in an order that depends on the seed alone.

    Drawn rows are numbered. `state_dict` is the position after the last batch; an order that loads it continues from
    there.
    """

    def __init__(self, dataset: Dataset[R], batch_size: int, seed: int) -> None:
        """Start at the first row; DataError if the dataset does not fill one batch."""
        if len(dataset) < batch_size:
            raise DataError(
                f"data.train_data has {len(dataset)} usable rows, fewer than trainer.train_batch_size="
                f"{batch_size}; lower the batch size or add data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._n_drawn = 0  # rows, over all epochs

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in the dataset."""
        return len(self._dataset) // self._batch_size

    @property
    @abstractmethod
    def n_epochs_over(self) -> int:
        """Epochs that have no batch left."""

    def next_batch(self) -> list[DrawnPrompt[R]]:
        """Draw the next batch; it starts the next epoch when this one is over."""
        rows = self._next_rows()
        first, self._n_drawn = self._n_drawn, self._n_drawn + len(rows)
        return [DrawnPrompt(first + i, row) for i, row in enumerate(rows)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the identity of the data."""
        return {**self._position(), "n_drawn": self._n_drawn, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with batches of any size.

        Raises:
            DataError: the state is of other data or another seed.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise DataError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={value}; resume with "
                    "the same data and seed, or start a new run with another trainer.run_name and "
                    "trainer.resume_mode=none"
                )
        self._load(state)
        self._n_drawn = state["n_drawn"]

    @abstractmethod
    def _next_rows(self) -> list[R]:
        """Return the rows of the next batch."""

    @abstractmethod
    def _position(self) -> dict[str, Any]:
        """Return the position."""

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Set the position to that of `state`."""

    def _identity(self) -> dict[str, Any]:
        return {"n_rows": len(self._dataset), "fingerprint": self._dataset.fingerprint, "seed": self._seed}


class ShuffledPrompts(PromptOrder[R]):
    """All rows, shuffled for each epoch. A last batch that is not full is dropped."""

    def __init__(self, dataset: Dataset[R], batch_size: int, seed: int) -> None:
        super().__init__(dataset, batch_size, seed)
        self._epoch = 0
        self._row = 0  # start of the next batch in the epoch's order

    @property
    def n_epochs_over(self) -> int:
        """Epochs that have no batch left."""
        return self._epoch + self._is_epoch_over

    @property
    def _is_epoch_over(self) -> bool:
        return self._row + self._batch_size > len(self._dataset)

    def _next_rows(self) -> list[R]:
        if self._is_epoch_over:
            self._epoch, self._row = self._epoch + 1, 0
        generator = torch.Generator().manual_seed((self._seed * EPOCHS_PER_SEED + self._epoch) % 2**63)
        order = torch.randperm(len(self._dataset), generator=generator)
        start, self._row = self._row, self._row + self._batch_size
        return [self._dataset[i] for i in order[start : self._row].tolist()]

    def _position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row}

    def _load(self, state: dict[str, Any]) -> None:
        if "epoch" not in state:
            raise DataError(
                "the checkpoint was made with data.mixture, and this run has none; set it, or start a new run with "
                "another trainer.run_name"
            )
        self._epoch, self._row = state["epoch"], state["row"]
