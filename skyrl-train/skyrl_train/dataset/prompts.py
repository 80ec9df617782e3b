"""A dataset of chat prompts, and the order in which training goes through it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.dataset.files import Row, read_rows
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow

logger = logging.getLogger(__name__)


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
            DataError: a source that cannot be read, a row without a chat prompt, or no row short enough.
        """
        sources = [datasets] if isinstance(datasets, str) else list(datasets)
        rows = []
        for source in sources:
            rows += [_checked(row, i, source, prompt_key) for i, row in enumerate(read_rows(source))]
        if not rows:
            raise DataError(f"no rows in {', '.join(sources)}")
        lengths = _prompt_lengths([row[prompt_key] for row in rows], tokenizer)
        kept = [row for row, n_tokens in zip(rows, lengths, strict=True) if n_tokens <= max_prompt_length]
        logger.info("%s: %d of %d rows have at most %d tokens", sources, len(kept), len(rows), max_prompt_length)
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts of {', '.join(sources)} are longer than trainer.max_prompt_length="
                f"{max_prompt_length} tokens (the shortest has {min(lengths)}); raise it"
            )
        self._rows = [_prompt_row(str(i), row, prompt_key, env_class_key) for i, row in enumerate(kept)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRow:
        return self._rows[index]

    def __iter__(self) -> Iterator[PromptRow]:
        return iter(self._rows)


class ShuffledPrompts:
    """Batches of prompts, epoch after epoch, each in an order that follows from the seed and the epoch alone.

    The last batch of an epoch is dropped when it is not full. `state_dict` is the position after the batch handed
    out last; a loader that loads it goes on with the batch that would have come next, at an epoch's end as well.
    """

    def __init__(self, dataset: PromptDataset, batch_size: int, seed: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = 0
        self._batch = 0

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in the dataset."""
        return len(self._dataset) // self._batch_size

    def next_batch(self) -> list[PromptRow]:
        """The next batch; starts the next epoch when this one is over."""
        if self._batch == self.batches_per_epoch:
            self._epoch, self._batch = self._epoch + 1, 0
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(len(self._dataset), generator=generator)
        start = self._batch * self._batch_size
        self._batch += 1
        return [self._dataset[i] for i in order[start : start + self._batch_size].tolist()]

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {"epoch": self._epoch, "batch": self._batch, "n_rows": len(self._dataset), "seed": self._seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from `state`.

        Raises:
            DataError: the dataset or the seed is another one, so the position means nothing here.
        """
        for name, value in (("n_rows", len(self._dataset)), ("seed", self._seed)):
            if state[name] != value:
                raise DataError(
                    f"the checkpoint was made with {name}={state[name]} and this run has {name}={value}; resume with "
                    "the same data and seed, or start anew with trainer.resume_mode=none and another trainer.run_name"
                )
        self._epoch, self._batch = state["epoch"], state["batch"]


def _checked(row: Row, i: int, source: str, prompt_key: str) -> Row:
    prompt = row.get(prompt_key)
    if prompt is None:
        raise DataError(
            f"row {i} of {source} has no {prompt_key!r}; its columns are {', '.join(row)}. "
            'A prompt is a list of messages: [{"role": "user", "content": "…"}]'
        )
    is_chat = isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt)
    if not is_chat:
        raise DataError(
            f"row {i} of {source}: {prompt_key}={str(prompt)[:80]!r} is not a list of messages; "
            'write [{"role": "user", "content": "…"}]'
        )
    return row


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _prompt_row(uid: str, row: Row, prompt_key: str, env_class_key: str) -> PromptRow:
    extras = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    return PromptRow(uid, row[prompt_key], row.get(env_class_key), extras)


def _prompt_lengths(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of each prompt with the assistant's header."""
    texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True)
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
