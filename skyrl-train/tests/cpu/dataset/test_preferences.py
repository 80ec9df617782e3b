"""Pairs of answers: the formats that rows come in, and their tokens."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from skyrl_train.config.preferences import PreferenceDataConfig
from skyrl_train.dataset.demonstrations import Demonstration, read_answers
from skyrl_train.dataset.files import Rows
from skyrl_train.dataset.supervised import (
    ConversationEncoder,
    SupervisedDataset,
    build_rewarded_segment,
    build_supervised_batch,
)
from skyrl_train.errors import DataError
from skyrl_train.types import DrawnPrompt

ENDING = st.text("ab c", min_size=1, max_size=6)
ASK = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("4", "5"))


def write_rows(folder: Path, rows: list[Any]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def read_all(sources: list[str], data: PreferenceDataConfig) -> list[tuple[Demonstration, ...]]:
    rows = Rows(sources)
    return list(read_answers(rows, range(len(rows)), data))


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
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_format_is_the_same_pair(row: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, [row])
    if suffix == "parquet":
        path = str(tmp_path / "rows.parquet")
        pq.write_table(pa.Table.from_pylist([row]), path)
    ((chosen, rejected),) = read_all([path], PreferenceDataConfig())
    assert (chosen.messages, rejected.messages) == ([ASK, GOOD], [ASK, BAD])
    assert chosen.n_context == rejected.n_context == 1


def test_the_prompt_of_texts_ends_before_a_word(tmp_path: Path) -> None:
    row = {"chosen": "\n\nHuman: Capital?\n\nAssistant: Paris", "rejected": "\n\nHuman: Capital?\n\nAssistant: Prague"}
    ((chosen, rejected),) = read_all([write_rows(tmp_path, [row])], PreferenceDataConfig())
    prompt = {"role": "user", "content": "\n\nHuman: Capital?\n\nAssistant:"}
    assert chosen.messages == [prompt, {"role": "assistant", "content": " Paris"}]
    assert rejected.messages == [prompt, {"role": "assistant", "content": " Prague"}]


@given(st.lists(st.sampled_from(["Yes", "No", "Maybe", "\n", " "]), max_size=8), st.tuples(ENDING, ENDING))
def test_a_prompt_and_its_answers_are_the_texts_that_were_split(words: list[str], endings: tuple[str, str]) -> None:
    row = dict(zip(("chosen", "rejected"), (" ".join(words) + ending for ending in endings), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        try:
            (pair,) = read_all([write_rows(Path(folder), [row])], PreferenceDataConfig())
        except DataError:
            return  # they have no word in common
    for demonstration, text in zip(pair, row.values(), strict=True):
        prompt, answer = (message["content"] for message in demonstration.messages)
        assert prompt + answer == text
        assert answer[0].isspace()
        assert not prompt[-1].isspace()


TWO_TURNS = [ASK, BAD, {"role": "user", "content": "Sure?"}]


def test_turns_before_the_answers_are_context(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"chosen": [*TWO_TURNS, GOOD], "rejected": [*TWO_TURNS, BAD]}
    dataset = SupervisedDataset(
        [write_rows(tmp_path, [row])], ConversationEncoder(tiny_tokenizer), PreferenceDataConfig()
    )
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
    dataset = SupervisedDataset(
        [write_rows(tmp_path, rows)], ConversationEncoder(tiny_tokenizer), PreferenceDataConfig()
    )
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
    data = PreferenceDataConfig.model_validate({"max_length": 40, "truncation": "right"})
    encoder = ConversationEncoder(tiny_tokenizer)
    assert len(SupervisedDataset([write_rows(tmp_path, rows)], encoder, data)) == 1


def test_equal_answers_are_reported(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "chosen": "x", "rejected": "x"}, {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}]
    with caplog.at_level(logging.WARNING):
        SupervisedDataset([write_rows(tmp_path, rows)], ConversationEncoder(tiny_tokenizer), PreferenceDataConfig())
    assert "2 of 2 pairs have equal answers, which teach nothing" in caplog.text


WRONG = [
    ({"prompt": "a", "chosen": "x"}, "row 0 of .* has no 'rejected': it has the keys prompt, chosen"),
    ({"prompt": "a", "chosen": "", "rejected": "x"}, "chosen is empty; write an answer, or remove the row"),
    ({"prompt": "a", "chosen": None, "rejected": "x"}, "chosen is empty; write an answer"),
    ({"prompt": "a", "chosen": " ", "rejected": "x"}, "chosen is empty; write an answer"),
    ({"prompt": "a", "chosen": 3, "rejected": "x"}, "chosen=3 is neither a text nor a list of messages"),
    ({"prompt": "a", "chosen": [ASK], "rejected": "x"}, "chosen has no message of the assistant after the prompt"),
    (
        {"chosen": "x y", "rejected": "a b"},
        "has no 'prompt', and chosen and rejected do not begin with the same prompt",
    ),
    ({"chosen": [GOOD], "rejected": [BAD]}, "do not begin with the same prompt"),
    ({"chosen": "x y", "rejected": [ASK, BAD]}, "do not begin with the same prompt"),
    (
        {"prompt": [ASK], "chosen": [{**ASK, "content": "2 + 2? "}, GOOD], "rejected": [ASK, BAD]},
        "row 0 of .*: chosen begins with a user message that is not the prompt; repeat the prompt exactly",
    ),
    (
        {"prompt": "2 + 2?", "chosen": [ASK, GOOD], "rejected": [{"role": "system", "content": "Add."}, ASK, BAD]},
        "rejected begins with a system message that is not the prompt",
    ),
    ({"prompt": 3, "chosen": "x", "rejected": "y"}, "prompt=3 is neither a text nor a list of messages"),
]


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_wrong_rows_are_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        list(read_all([write_rows(tmp_path, [row])], PreferenceDataConfig()))
