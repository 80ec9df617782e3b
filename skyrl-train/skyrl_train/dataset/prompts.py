"""A dataset of chat prompts."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_gym.runtime.text import describe_error
from skyrl_train.dataset.files import Row
from skyrl_train.dataset.rows import read_prompt_rows
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
            DataError: a source cannot be read, a row has no chat prompt or one that the chat template refuses, or no
                row is short enough.
        """
        sources = [datasets] if isinstance(datasets, str) else list(datasets)
        rows, texts, locations = [], [], []
        for location, row in read_prompt_rows(sources, prompt_key, env_class_key):
            locations.append(location)
            texts.append(_render(row[prompt_key], location, tokenizer))
            rows.append(row)
        lengths = _bound_lengths(texts, tokenizer, max_prompt_length)
        kept = [i for i, n_tokens in enumerate(lengths) if n_tokens <= max_prompt_length]
        logger.info("%s: %d of %d rows have at most %d tokens", sources, len(kept), len(rows), max_prompt_length)
        if not kept:
            raise DataError(
                f"all {len(rows)} prompts of {', '.join(sources)} are longer than trainer.max_prompt_length="
                f"{max_prompt_length} tokens (the shortest has {min(lengths)}); raise it"
            )
        self._rows = [_prompt_row(str(n), rows[i], prompt_key, env_class_key) for n, i in enumerate(kept)]
        self._locations = [locations[i] for i in kept]

    def location(self, index: int) -> str:
        """Return the origin of a row for messages: `row 17 of train.jsonl`."""
        return self._locations[index]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all rows in their order."""
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


def _bound_lengths(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int) -> list[int]:
    """Return the number of tokens of each text, or an upper bound for texts that are short enough without tokenizing.

    A token of ASCII text has at least one character; some tokenizers add one before the text.
    """
    lengths = [len(text) + 1 if text.isascii() else limit + 1 for text in texts]
    long = [i for i, length in enumerate(lengths) if length > limit]
    for start in range(0, len(long), 1000):
        chunk = long[start : start + 1000]
        token_ids = tokenizer([texts[i] for i in chunk], add_special_tokens=False)["input_ids"]
        for i, ids in zip(chunk, token_ids, strict=True):
            lengths[i] = len(ids)
    return lengths


def _prompt_row(uid: str, row: Row, prompt_key: str, env_class_key: str) -> PromptRow:
    extras = {name: value for name, value in row.items() if name not in (prompt_key, env_class_key)}
    return PromptRow(uid, row[prompt_key], row.get(env_class_key), extras)


def _render(prompt: Sequence[Mapping[str, Any]], name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render the prompt with the assistant's header."""
    try:
        conversation = [dict(message) for message in prompt]
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # the boundary of a template, which may do anything
        roles = ", ".join(message["role"] for message in prompt)
        raise DataError(
            f"{name}: the tokenizer's chat template refuses a prompt with the roles {roles} ({describe_error(error)}); "
            "change the prompt, or the template"
        ) from error
