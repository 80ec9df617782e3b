"""A dataset of chat prompts, and one of the rows of a user-defined class (`data.custom_cls`)."""

import hashlib
import inspect
import json
import logging
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from skyrl_gym.data.files import ROWS_AT_ONCE, Row, clean_row
from skyrl_gym.data.images import place_prompt_images, read_images
from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.envs.row import to_python
from skyrl_gym.error import InvalidSpec
from skyrl_gym.images import find_images
from skyrl_gym.runtime.text import describe_error
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.root import REWARD_FUNCTION_ENV
from skyrl_train.dataset.files import JoinedRows, reading_rows
from skyrl_train.dataset.rows import LocatedRow, check_row, read_prompt_rows
from skyrl_train.errors import ConfigError, DataError, InvalidRow, SkippedRow
from skyrl_train.media.processing import find_text_model
from skyrl_train.rendering.template import ChatTemplate
from skyrl_train.types import PromptRow

logger = logging.getLogger(__name__)


class PromptDataset:
    """Rows whose prompt has at most `max_prompt_length` tokens, from one or several sources joined in order.

    Rows and their images are read when they are used. If there are more than `max_checked_rows`, only a sample is
    checked up front, so each row is checked when it is drawn, and skipped if it is invalid or too long.
    """

    check_drawn: Callable[[LocatedRow], None] | None = None
    """Extra check of each drawn row, unless all rows were checked up front. A DataError skips the row."""

    longest_prompt: int | None = None
    """Tokens of the longest prompt among those that were counted, or None if none was."""

    def __init__(
        self,
        datasets: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int,
        num_workers: int = 8,
        prompt_key: str = "prompt",
        env_class_key: str = "env_class",
        max_checked_rows: int | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the sources, then check and filter their rows.

        `chat_template` (default: the tokenizer's) renders prompts with the variables `chat_template_kwargs`.
        `num_workers` exists for SkyRL and has no effect.

        Raises:
            ConfigError: a row has images, and the model's image processor cannot be loaded.
            DataError: a source or an image cannot be read, a row has no chat prompt or the chat template rejects it, or
                no row is short enough.
        """
        sources = [datasets] if isinstance(datasets, str) else list(datasets)
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, chat_template, chat_template_kwargs)
        self._max_length = max_prompt_length
        self._prompt_key, self._env_class_key = prompt_key, env_class_key
        self._rows = JoinedRows(sources)
        self._sample = self._rows.sample(max_checked_rows)
        self.is_checked = len(self._sample) == len(self._rows)
        """True if all rows were checked up front and rows with long prompts were dropped."""
        kept, shortest, digest = array("q"), math.inf, hashlib.blake2b(digest_size=16)
        for chunk in self._read_chunks():
            for (index, _, row), n_tokens in zip(chunk, self._bound_lengths(chunk), strict=True):
                shortest = min(shortest, n_tokens)
                if n_tokens <= max_prompt_length:
                    if self.is_checked:
                        digest.update(repr(self._prompt_row(len(kept), row)).encode())
                    kept.append(index)
        if not kept:
            raise DataError(
                f"all {len(self._sample)} prompts of {', '.join(sources)} are longer than trainer.max_prompt_length="
                f"{max_prompt_length} tokens (the shortest has {shortest}); raise it"
            )
        self._indices: Sequence[int] = kept if self.is_checked else range(len(self._rows))
        self._digest = digest.hexdigest() if self.is_checked else None
        logger.info(
            "%s: kept %d of %d prompts (≤ %d tokens)",
            *(", ".join(sources), len(kept), len(self._sample), max_prompt_length),
        )
        if not self.is_checked:
            logger.info(
                "They are a sample of %d rows (data.max_checked_rows=%d); other rows are checked when they are drawn",
                *(len(self._rows), len(self._sample)),
            )

    @property
    def fingerprint(self) -> str:
        """A hash of all rows in their order."""
        return self._digest or self._rows.digest

    def checked_rows(self) -> Iterator[tuple[str, PromptRow]]:
        """Yield (location, row) for each row that was checked up front. Its images are not read."""
        indices = self._indices if self.is_checked else self._sample
        for number, (location, row) in enumerate(self._read_unread(indices)):
            yield location, self._prompt_row(number, row)

    def data_sources(self) -> Iterator[str]:
        """Yield `PromptRow.data_source` of every row."""
        indices = iter(self._indices)
        wanted = next(indices)
        for index, value in enumerate(self._rows.read_column("data_source")):
            if index == wanted:
                yield PromptRow("", [], None, {"data_source": value}).data_source
                wanted = next(indices, -1)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> PromptRow:
        """Return a row.

        A row not checked up front may raise InvalidRow, or SkippedRow if its prompt is too long. A row whose image can
        no longer be read raises InvalidRow.
        """
        try:
            (checked,) = self._read_rows([self._indices[index]])
            _, location, row = checked
            prompt_row = self._prompt_row(index, row)
            if self.is_checked:
                return prompt_row
            (n_tokens,) = self._bound_lengths([checked])
            if self.check_drawn is not None and n_tokens <= self._max_length:
                self.check_drawn((location, prompt_row))
        except DataError as error:
            raise InvalidRow(str(error)) from error
        if n_tokens > self._max_length:
            raise SkippedRow(f"{location} has {n_tokens} tokens, more than {self._max_length}")
        return prompt_row

    def __iter__(self) -> Iterator[PromptRow]:
        return (self[index] for index in range(len(self)))

    def _prompt_row(self, number: int, row: Row) -> PromptRow:
        extras = {name: value for name, value in row.items() if name not in (self._prompt_key, self._env_class_key)}
        return PromptRow(str(number), row[self._prompt_key], row.get(self._env_class_key), extras)

    def _read_unread(self, indices: Sequence[int]) -> Iterator[tuple[str, Row]]:
        """Yield (location, columns) of rows. Their images are in the prompt, but unread."""
        find_text_model = self._template.find_text_model
        return read_prompt_rows(self._rows, indices, find_text_model, self._prompt_key, self._env_class_key)

    def _read_rows(self, indices: Sequence[int]) -> Iterator[tuple[int, str, Row]]:
        """Yield (index, location, columns) of rows with their images."""
        for index, (location, row) in zip(indices, self._read_unread(indices), strict=True):
            with reading_rows():
                row[self._prompt_key] = read_images(row[self._prompt_key], location, self._rows.folder(index))
            yield index, location, row

    def _read_chunks(self) -> Iterator[list[tuple[int, str, Row]]]:
        """Yield the sample in chunks to tokenize at once. Only their last row has images, which need memory."""
        chunk = []
        for index, location, row in self._read_rows(self._sample):
            chunk.append((index, location, row))
            if len(chunk) == ROWS_AT_ONCE or find_images(row[self._prompt_key]):
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _bound_lengths(self, rows: Sequence[tuple[int, str, Row]]) -> list[int]:
        """Return each prompt's number of tokens up to and including the assistant's header. Images count in full.

        If an upper bound is already within the limit, it is returned instead. ASCII text has at most one token per
        character, plus one if the tokenizer adds a token before the text. So 100 ASCII characters are at most 101
        tokens, and a limit of 512 needs no tokenization. Only the longest text is then counted, for `longest_prompt`.
        """
        limit = self._max_length
        texts = []
        for _, location, row in rows:
            prompt = row[self._prompt_key]
            try:
                self._template.check_roles(prompt)
                self._template.check_written(prompt)
                texts.append(self._template.expand(self._template.prompt(prompt), prompt))
            except DataError as error:
                raise DataError(f"{location}: {error}") from error
        lengths = [len(text) + 1 if text.isascii() else limit + 1 for text in texts]
        longest = max((i for i, length in enumerate(lengths) if length <= limit), key=lengths.__getitem__, default=None)
        counted = [i for i, length in enumerate(lengths) if length > limit or i == longest]
        token_ids = self._tokenizer([texts[i] for i in counted], add_special_tokens=False)["input_ids"]
        for i, ids in zip(counted, token_ids, strict=True):
            lengths[i] = len(ids)
            if len(ids) <= limit:
                self.longest_prompt = max(self.longest_prompt or 0, len(ids))
        return lengths


N_CHECKED_ROWS = 4  # rows per split to check before models are loaded

TENSORS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids")
"""Columns of verl datasets that the trainer computes itself."""


class CustomDataset(PromptDataset):
    """The rows of `data.custom_cls`, as prompts.

    A row is a mapping with `prompt` (or verl's `raw_prompt`), a list of messages, and the columns that its environment
    or reward function reads. Prompts longer than `trainer.max_prompt_length` cannot be dropped, because rows are read
    only when they are drawn. Their rollouts are invalid and counted as `generate/n_invalid/prompt_too_long`.
    """

    def __init__(
        self, cfg: SkyRLConfig, tokenizer: PreTrainedTokenizerBase, split: Literal["train", "validation"]
    ) -> None:
        """Load and construct the class. Raise ConfigError if that fails, DataError if the dataset is empty."""
        self._cfg = cfg.data.custom_cls
        self.is_checked = False
        self._tokenizer = tokenizer
        self._is_drawn = split == "train"
        self._plays_function = cfg.custom_reward_function.path is not None
        path, name = str(self._cfg.path), str(self._cfg.name)
        self._name = f"{name} of {path}"
        files = cfg.data.train_data if split == "train" else cfg.data.val_data
        config = {
            "train_files": cfg.data.train_data,
            "val_files": cfg.data.val_data,
            "prompt_key": "prompt",
            "max_prompt_length": cfg.trainer.max_prompt_length,
            "seed": cfg.trainer.seed,
            "custom_cls": self._cfg.model_dump(),
        }
        try:
            cls = load_from_file(path, name)
        except InvalidSpec as error:
            raise ConfigError(f"data.custom_cls.name={name}: {error}") from error
        except Exception as error:  # the boundary of a user's file
            raise ConfigError(f"failed to load data.custom_cls.path={path}: {describe_error(error)}") from error
        try:
            takes_split = "split" in inspect.signature(cls).parameters
            self._dataset = cls(
                data_files=files,
                tokenizer=tokenizer,
                processor=None,
                config=OmegaConf.create(config),
                max_samples=-1,
                **({"split": split} if takes_split else {}),
            )
            self._length = len(self._dataset)
        except Exception as error:  # the boundary of a user's class
            raise ConfigError(f"failed to construct data.custom_cls.name={name}: {describe_error(error)}") from error
        if self._length == 0:
            raise DataError(
                f"the dataset {self._name} has no {split} rows; check its options in data.custom_cls.config"
            )

    def location(self, index: int) -> str:
        """Return the origin of a row for messages: `row 17 of MyDataset of my.py`."""
        return f"row {index} of {self._name}"

    @cached_property
    def fingerprint(self) -> str:
        """The dataset's `fingerprint`, or if it has none, a hash of the file, the class and its options."""
        own = getattr(self._dataset, "fingerprint", None)
        if isinstance(own, str):
            return own
        options = json.dumps(self._cfg.model_dump(exclude={"path"}), sort_keys=True)
        return hashlib.blake2b(Path(str(self._cfg.path)).read_bytes() + options.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> PromptRow:
        """Return a row. If it cannot be used, raise InvalidRow in training and DataError in evaluation."""
        if not self._is_drawn:
            return self._read(index)
        try:
            row = self._read(index)
            if self.check_drawn is not None:
                self.check_drawn((self.location(index), row))
        except DataError as error:
            raise InvalidRow(str(error)) from error
        return row

    def _read(self, index: int) -> PromptRow:
        location = self.location(index)
        try:
            row = self._dataset[index]
        except Exception as error:  # the boundary of a user's class
            raise DataError(f"cannot read {location}: {describe_error(error)}") from error
        if not isinstance(row, Mapping):
            raise DataError(f"{location} is a {type(row).__name__}; return a mapping with a prompt")
        columns = to_python({name: value for name, value in row.items() if name not in TENSORS})
        if "raw_prompt" in columns:
            columns["prompt"] = columns.pop("raw_prompt")
        with reading_rows():
            columns = clean_row(columns, location)
            check_row(columns, location)
            place_prompt_images(columns, location, "prompt", lambda: find_text_model(self._tokenizer.name_or_path))
            columns["prompt"] = read_images(columns["prompt"], location, folder=None)
        prompt, env_class = columns.pop("prompt"), columns.pop("env_class", None)
        if self._plays_function and env_class not in (None, REWARD_FUNCTION_ENV):
            raise DataError(
                f"{location} has env_class={env_class}, which scores replies itself, alongside custom_reward_function; "
                "remove one of them"
            )
        return PromptRow(str(index), prompt, env_class, columns)

    def checked_rows(self) -> Iterator[tuple[str, PromptRow]]:
        """Yield (location, row) for the first `N_CHECKED_ROWS` rows."""
        return ((self.location(index), self._read(index)) for index in range(min(N_CHECKED_ROWS, self._length)))
