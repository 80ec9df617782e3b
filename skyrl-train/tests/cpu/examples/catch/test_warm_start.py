"""The warm start trains the tiny model on random play, and writes it completely or not at all."""

from pathlib import Path

import pytest

from examples.catch import warm_start
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.warm_start import make_model, play_at_random
from skyrl_train.models.loading import load_tokenizer


@pytest.fixture
def train_file(short_start: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(warm_start, "N_STEPS", 20)
    write_dataset(CatchDataset(train_size=20, test_size=2), tmp_path / "data")
    return tmp_path / "data/train.parquet"


def test_the_model_learns_the_format_of_the_game(train_file: Path, tmp_path: Path) -> None:
    assert make_model(train_file, tmp_path / "model", seed=0) < 3.0  # ln(vocabulary) is about 6
    with pytest.raises(ValueError, match="exists already"):
        make_model(train_file, tmp_path / "model", seed=0)
    assert not (tmp_path / "model.partial").exists()
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    for text in ("L", "R", "S", *"0123456789"):
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 1, text


def test_random_play_is_uniform_and_reproducible() -> None:
    rows = list(CatchDataset(train_size=20).train_rows())
    games = play_at_random(rows, n_games=100, seed=1)
    assert games == play_at_random(rows, n_games=100, seed=1)
    answers = [message["content"] for game in games for message in game if message["role"] == "assistant"]
    assert len(answers) == 500
    for action in "LRS":
        assert 0.25 < answers.count(action) / len(answers) < 0.42
