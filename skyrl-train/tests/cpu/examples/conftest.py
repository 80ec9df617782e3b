from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

import skyrl_gym
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.models.tiny import train_tokenizer
from skyrl_train.types import PromptRow

Splits = dict[str, list[PromptRow]]
Prepare = Callable[..., Splits]
Play = Callable[..., float | None]


@pytest.fixture(scope="session")
def bytes_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are bytes."""
    return train_tokenizer([])


@pytest.fixture
def prepare(tmp_path: Path, bytes_tokenizer: PreTrainedTokenizerBase) -> Prepare:
    """Run a dataset script, and read its files as the trainer does."""

    def run(main: Callable[[Sequence[str]], None], *flags: str) -> Splits:
        folder = tmp_path / "data"
        main(["--output_dir", str(folder), *flags])
        assert sorted(path.name for path in folder.glob("*parquet*")) == ["train.parquet", "validation.parquet"]
        return {
            split: list(PromptDataset(str(folder / f"{split}.parquet"), bytes_tokenizer, max_prompt_length=100_000))
            for split in ("train", "validation")
        }

    return run


@pytest.fixture(scope="session")
def play() -> Play:
    """Play a row with the given replies, as the generator of the trainer does, and return the sum of the rewards."""

    def run(row: PromptRow, *replies: str, max_turns: int = 4, **env_config: object) -> float | None:
        assert row.env_class is not None
        extras = row.env_extras | {"max_turns": max_turns}
        with skyrl_gym.make(row.env_class, env_config=env_config, extras=extras) as env:
            env.init(row.prompt)
            outputs = [env.step(reply) for reply in replies]
        assert [output["done"] for output in outputs] == [False] * (len(replies) - 1) + [True]
        return sum(output["reward"] for output in outputs)

    return run
