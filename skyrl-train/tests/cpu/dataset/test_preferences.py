"""Pairs of answers: the formats that rows come in, and their tokens."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_kit import golden
from train_kit.datasets import read_demonstrations, write_rows
from train_kit.messages import assistant, user
from transformers import PreTrainedTokenizerBase

from skyrl_train.config.supervised import PreferenceDataConfig
from skyrl_train.dataset.supervised import (
    ConversationEncoder,
    SupervisedDataset,
    build_rewarded_segment,
    build_supervised_batch,
)
from skyrl_train.errors import DataError
from skyrl_train.types import DrawnPrompt

ENDING = st.text("ab c", min_size=1, max_size=6)
ASK, GOOD, BAD = user("2 + 2?"), assistant("4"), assistant("5")


FORMATS = {
    "texts": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
    "messages": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "a text and messages": {"prompt": "2 + 2?", "chosen": [GOOD], "rejected": [BAD]},
    "messages and texts": {"prompt": [ASK], "chosen": "4", "rejected": "5"},
    "conversations": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "a prompt and conversations": {"prompt": "2 + 2?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "scores beside it": {"prompt": "2 + 2?", "chosen": "4", "rejected": "5", "score_chosen": 9.0, "messages": [ASK]},
}


@pytest.mark.parametrize("row", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_every_format_is_the_same_pair(row: dict[str, Any], name: str, tmp_path: Path) -> None:
    ((chosen, rejected),) = read_demonstrations(write_rows(tmp_path, [row], name), PreferenceDataConfig())
    assert (chosen.messages, rejected.messages) == ([ASK, GOOD], [ASK, BAD])
    assert chosen.n_context == rejected.n_context == 1


def test_the_prompt_of_texts_ends_before_a_word(tmp_path: Path) -> None:
    asked = "\n\nHuman: Capital?\n\nAssistant:"
    row = {"chosen": f"{asked} Paris", "rejected": f"{asked} Prague"}
    ((chosen, rejected),) = read_demonstrations(write_rows(tmp_path, [row]), PreferenceDataConfig())
    assert chosen.messages == [user(asked), assistant(" Paris")]
    assert rejected.messages == [user(asked), assistant(" Prague")]


@given(st.lists(st.sampled_from(["Yes", "No", "Maybe", "\n", " "]), max_size=8), st.tuples(ENDING, ENDING))
def test_a_prompt_and_its_answers_are_the_texts_that_were_split(words: list[str], endings: tuple[str, str]) -> None:
    row = dict(zip(("chosen", "rejected"), (" ".join(words) + ending for ending in endings), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        try:
            (pair,) = read_demonstrations(write_rows(Path(folder), [row]), PreferenceDataConfig())
        except DataError:
            return  # they have no word in common
    for demonstration, text in zip(pair, row.values(), strict=True):
        prompt, answer = (message["content"] for message in demonstration.messages)
        assert prompt + answer == text
        assert answer[0].isspace()
        assert not prompt[-1].isspace()


TWO_TURNS = [ASK, BAD, user("Sure?")]


def read_pairs(
    rows: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, folder: Path, **settings: Any
) -> SupervisedDataset:
    data = PreferenceDataConfig.model_validate(settings)
    return SupervisedDataset([write_rows(folder, rows)], ConversationEncoder(tokenizer), data)


def test_turns_before_the_answers_are_context(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"chosen": [*TWO_TURNS, GOOD], "rejected": [*TWO_TURNS, BAD]}
    dataset = read_pairs([row], tiny_tokenizer, tmp_path)
    for (segment,), text in zip(dataset[0], ("4<|im_end|>", "5<|im_end|>"), strict=True):
        trained = [token for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True) if mask]
        assert tiny_tokenizer.decode(trained) == text


def test_a_batch_has_the_chosen_answer_before_the_rejected_one(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"prompt": "a", "chosen": "good", "rejected": "bad, and long"},
        {"prompt": "b", "chosen": "x", "rejected": "y"},
    ]
    dataset = read_pairs(rows, tiny_tokenizer, tmp_path)
    batch = build_supervised_batch([DrawnPrompt(i, dataset[i], i) for i in range(2)], tiny_tokenizer.pad_token_id)
    assert batch.draws.tolist() == [0, 0, 1, 1]
    assert batch.trajectories is not None
    assert batch.trajectories.tolist() == [0, 1, 2, 3]
    assert batch.n_prompts == 2
    texts = [
        tiny_tokenizer.decode(row[mask.bool()])
        for row, mask in zip(batch.sequences[:, -batch.response_length :], batch.loss_mask, strict=True)
    ]
    assert texts == ["good<|im_end|>", "bad, and long<|im_end|>", "x<|im_end|>", "y<|im_end|>"]


def test_a_reward_is_read_at_the_last_token_that_is_no_padding() -> None:
    segment = build_rewarded_segment([5, 6, 7, 9], pad_token_id=0)
    assert (segment.token_ids, segment.n_prompt, segment.loss_mask) == ([5, 6, 7, 9, 9], 4, [1])
    segment = build_rewarded_segment([5, 6, 7, 9], pad_token_id=9)  # the EOS token pads
    assert (segment.token_ids, segment.n_prompt, segment.loss_mask) == ([5, 6, 7, 7], 3, [1])


def test_a_pair_without_an_answer_left_is_dropped(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"prompt": "a" * n, "chosen": "good", "rejected": "bad"} for n in (1, 100)]
    assert len(read_pairs(rows, tiny_tokenizer, tmp_path, max_length=40, truncation="right")) == 1


def test_equal_answers_are_reported(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}]
    read_pairs(rows, tiny_tokenizer, tmp_path)
    assert "2 of 2 pairs have equal answers, so they teach nothing" in caplog.text


def test_wrong_rows_are_refused(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    def find_error(row: dict[str, Any]) -> str:
        path = write_rows(tmp_path, [row])
        return golden.catch(DataError, lambda: read_demonstrations(path, PreferenceDataConfig()), tmp_path)

    rows = {row: [find_error(json.loads(row))] for row in golden.read("dataset/preferences")}
    golden.compare("dataset/preferences", rows, pytestconfig)
