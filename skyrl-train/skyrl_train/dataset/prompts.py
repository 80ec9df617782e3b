"""A dataset of chat prompts, and the order in which training goes through it."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from skyrl_gym.contract import is_conversation
from skyrl_train.dataset.files import Row, read_rows
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow

logger = logging.getLogger(__name__)

EPOCHS_PER_SEED = 1_000_003  # the second epoch of one seed is not the first of the next


class PromptDataset:
    """Rows whose prompt has at most `max_prompt_length` tokens, from one or several sources joined in order."""

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
    ) -> None:
        """Read, check and filter the rows.

        Raises:
            DataError: a source that cannot be read, a row without a chat prompt, one whose prompt the chat template
                refuses, or no row short enough.
        """
        sources = [datasets] if isinstance(datasets, str) else list(datasets)
        rows, texts = [], []
        for source in sources:
            for i, row in enumerate(read_rows(source)):
                _check_prompt(row, i, source, prompt_key)
                texts.append(_render(row[prompt_key], f"row {i} of {source}", tokenizer))
                rows.append(row)
        if not rows:
            raise DataError(f"no rows in {', '.join(sources)}")
        lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        kept = [row for row, n_tokens in zip(rows, lengths, strict=True) if n_tokens <= max_prompt_length]
        logger.info("%s: %d of %d rows have at most %d tokens", sources, len(kept), len(rows), max_prompt_length)
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts of {', '.join(sources)} are longer than trainer.max_prompt_length="
                f"{max_prompt_length} tokens (the shortest has {min(lengths)}); raise it"
            )
        self._rows = [_prompt_row(str(i), row, prompt_key, env_class_key) for i, row in enumerate(kept)]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every row, the same for the same data in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self._rows:
            digest.update(repr(row).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)


class PromptOrder(ABC):
    """Batches of prompts, epoch after epoch, in an order that follows from the seed alone.

    `state_dict` is the position after the batch handed out last; an order that loads it goes on with what would have
    come next.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, seed: int) -> None:
        """DataError if the dataset does not fill one batch."""
        if len(dataset) < batch_size:
            raise DataError(
                f"data.train_data has {len(dataset)} usable prompts, fewer than trainer.train_batch_size="
                f"{batch_size}; lower the batch size or add data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in the dataset."""
        return len(self._dataset) // self._batch_size

    @property
    @abstractmethod
    def n_epochs_over(self) -> int:
        """Epochs that have no batch left."""

    @abstractmethod
    def next_batch(self) -> list[PromptRow]:
        """The next batch; starts the next epoch when this one is over."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, with batches of any size.

        Raises:
            DataError: the data or the seed is another one, so the position means nothing here.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise DataError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={value}; resume with "
                    "the same data and seed, or start anew with trainer.resume_mode=none and another trainer.run_name"
                )
        self._load(state)

    @abstractmethod
    def _load(self, state: dict[str, Any]) -> None:
        """Take the position of `state`, which is one in the same data."""

    def _identity(self) -> dict[str, Any]:
        """What a position is a position in."""
        return {"n_rows": len(self._dataset), "fingerprint": self._dataset.fingerprint, "seed": self._seed}


class ShuffledPrompts(PromptOrder):
    """All rows shuffled, anew in each epoch. The last batch of an epoch is dropped when it is not full."""

    def __init__(self, dataset: PromptDataset, batch_size: int, seed: int) -> None:
        """See `PromptOrder`."""
        super().__init__(dataset, batch_size, seed)
        self._epoch = 0
        self._row = 0  # of the epoch's order: where the next batch starts

    @property
    def n_epochs_over(self) -> int:
        """See `PromptOrder`."""
        return self._epoch + self._is_epoch_over

    @property
    def _is_epoch_over(self) -> bool:
        return self._row + self._batch_size > len(self._dataset)

    def next_batch(self) -> list[PromptRow]:
        """See `PromptOrder`."""
        if self._is_epoch_over:
            self._epoch, self._row = self._epoch + 1, 0
        generator = torch.Generator().manual_seed(self._seed * EPOCHS_PER_SEED + self._epoch)
        order = torch.randperm(len(self._dataset), generator=generator)
        start, self._row = self._row, self._row + self._batch_size
        return [self._dataset[i] for i in order[start : self._row].tolist()]

    def state_dict(self) -> dict[str, Any]:
        """See `PromptOrder`."""
        return {"epoch": self._epoch, "row": self._row} | self._identity()

    def _load(self, state: dict[str, Any]) -> None:
        if "epoch" not in state:
            raise DataError(
                "the checkpoint was made with data.mixture, and this run has none; give it the same, or start anew "
                "with another trainer.run_name"
            )
        self._epoch, self._row = state["epoch"], state["row"]


def _check_prompt(row: Row, i: int, source: str, prompt_key: str) -> None:
    prompt = row.get(prompt_key)
    if prompt is None:
        raise DataError(
            f"row {i} of {source} has no {prompt_key!r}; its columns are {', '.join(row)}. "
            'A prompt is a list of messages: [{"role": "user", "content": "…"}]'
        )
    if not prompt or not is_conversation(prompt):
        raise DataError(
            f"row {i} of {source}: {prompt_key}={str(prompt)[:80]!r} is not a list of messages; "
            'write [{"role": "user", "content": "…"}]'
        )


def _prompt_row(uid: str, row: Row, prompt_key: str, env_class_key: str) -> PromptRow:
    extras = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    return PromptRow(uid, row[prompt_key], row.get(env_class_key), extras)


def _render(prompt: Sequence[Mapping[str, Any]], name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt with the assistant's header, as the model will read it."""
    try:
        conversation = [dict(message) for message in prompt]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in prompt)
        raise DataError(
            f"{name}: the tokenizer's chat template refuses a prompt with the roles {roles} ({error}); "
            "change the prompt, or the template"
        ) from error
