from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

import skyrl_gym
from examples import learning, tiny_model
from examples.catch import warm_start
from skyrl_train.dataset.files import write_jsonl
from skyrl_train.dataset.prompts import PromptDataset
from skyrl_train.entrypoints.tiny import train_tokenizer
from skyrl_train.types import PromptRow

Splits = dict[str, list[PromptRow]]
Prepare = Callable[..., Splits]
Play = Callable[..., float | None]
Main = Callable[[Sequence[str]], None]


@pytest.fixture(scope="session")
def bytes_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are bytes."""
    return train_tokenizer([])


@pytest.fixture
def prepare(tmp_path: Path, bytes_tokenizer: PreTrainedTokenizerBase) -> Prepare:
    """A function that runs a dataset script, and reads its files as the trainer does."""

    def run(main: Main, *flags: str) -> Splits:
        folder = tmp_path / "data"
        main(["--output_dir", str(folder), *flags])
        assert sorted(path.name for path in folder.glob("*parquet*")) == ["train.parquet", "validation.parquet"]
        return {
            split: list(PromptDataset(str(folder / f"{split}.parquet"), bytes_tokenizer, max_prompt_length=100_000))
            for split in ("train", "validation")
        }

    return run


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., str]:
    """A function that writes raw rows as `train.jsonl` and `test.jsonl`, and returns their folder."""

    def write(train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]]) -> str:
        folder = tmp_path / "raw"
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", train)
        write_jsonl(folder / "test.jsonl", test)
        return str(folder)

    return write


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a dataset script, which must end before it writes a file, and returns its message."""

    def run(main: Main, *flags: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["--output_dir", str(tmp_path / "data"), *flags])
        assert stopped.value.code == 2
        assert not (tmp_path / "data").exists()
        return capsys.readouterr().err

    return run


@pytest.fixture
def short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the learning examples train their first model on few conversations."""
    for module in (learning, warm_start):
        monkeypatch.setattr(module, "N_CONVERSATIONS", 64)
    monkeypatch.setattr(tiny_model, "BATCH_SIZE", 8)


@pytest.fixture(scope="session")
def play() -> Play:
    """A function that plays a row with replies, as the generator of the trainer does, and returns the total reward."""

    def run(row: PromptRow, *replies: str, max_turns: int = 4, **env_config: object) -> float | None:
        assert row.env_class is not None
        extras = row.env_extras | {"max_turns": max_turns}
        with skyrl_gym.make(row.env_class, env_config=env_config, extras=extras) as env:
            env.init(row.prompt)
            outputs = [env.step(reply) for reply in replies]
        assert [output["done"] for output in outputs] == [False] * (len(replies) - 1) + [True]
        return sum(output["reward"] for output in outputs)

    return run
