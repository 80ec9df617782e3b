"""User-defined dataset classes (`data.custom_cls`). Their rows are read when they are drawn."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from skyrl_gym.data.files import clean_row
from skyrl_gym.data.images import place_prompt_images, read_images
from skyrl_gym.envs.entry_point import load_from_file
from skyrl_gym.envs.row import to_python
from skyrl_gym.error import InvalidSpec
from skyrl_gym.runtime.text import describe_error
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.root import REWARD_FUNCTION_ENV
from skyrl_train.dataset.files import reading_rows
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.dataset.rows import check_row
from skyrl_train.errors import ConfigError, DataError, InvalidRow
from skyrl_train.media.processing import find_text_model
from skyrl_train.types import PromptRow

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
