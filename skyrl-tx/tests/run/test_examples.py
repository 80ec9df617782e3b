from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast
from tx_tiny_models import new_tokenizer

from tx.run.examples import Examples, read_rows
from tx.tinker.types import Datum, UserError

CONVERSATION = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "44"},
]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
"""Shows the thinking of the last reply only."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def examples(tokenizer: PreTrainedTokenizerFast, folder: Path, max_length: int = 200) -> Examples:
    tokenizer.save_pretrained(folder)
    return Examples(folder, max_length)


def counted(tokenizer: PreTrainedTokenizerFast, datum: Datum) -> str:
    """What is learned of a datum."""
    targets = datum.inputs["target_tokens"][datum.inputs["weights"] == 1.0]
    return str(tokenizer.decode(targets))


def test_replies_count(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (datum,) = examples(tokenizer, tmp_path).of_row(1, {"messages": CONVERSATION})
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode([datum.tokens[0], *datum.inputs["target_tokens"]]) == whole
    assert counted(tokenizer, datum) == "4<|im_end|>\n44<|im_end|>\n"


def test_a_reply_that_is_shown_otherwise_later_has_a_sequence_of_its_own(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = THINKING
    data = examples(tokenizer, tmp_path).of_row(1, {"messages": CONVERSATION})
    assert [counted(tokenizer, one) for one in data] == ["4<|im_end|>", "44<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc"}, "bc<|im_end|>"),
        ({"prompt": "2+2=", "completion": "4"}, "4<|im_end|>"),
        ({"prompt": CONVERSATION[:3], "completion": "44"}, "44<|im_end|>\n"),
        ({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, "44<|im_end|>\n"),
    ],
)
def test_kinds_of_rows(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    (datum,) = examples(tokenizer, tmp_path).of_row(1, row)
    assert counted(tokenizer, datum) == expected


def test_long_rows_lose_their_end(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (datum,) = examples(tokenizer, tmp_path, max_length=3).of_row(1, {"text": "abcdef"})
    assert len(datum.tokens) == 3
    assert counted(tokenizer, datum) == "bcd"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, r"row 7: it has question; a row has 'messages'"),
        ({"messages": CONVERSATION[:1]}, "row 7: it has no message of the assistant"),
        ({"messages": [{"content": "x"}]}, "row 7: 'role'"),
        ({"messages": 3}, "row 7: 'int' object is not iterable"),
        ({"prompt": "x" * 300, "completion": "y"}, r"row 7: no token of it counts within --max-length 200"),
    ],
)
def test_rows_of_other_kinds(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        examples(tokenizer, tmp_path).of_row(7, row)


def test_files(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "ü"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [read_rows(tmp_path / name) for name in ("a.jsonl", "a.json", "a.parquet")] == [rows] * 3


def test_a_text_may_hold_other_ends_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\n', encoding="utf-8", newline="")
    assert read_rows(tmp_path / "a.jsonl") == [{"text": "a\u2028b\u0085c"}, {"text": "d"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"line 2: Expecting value"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.json", '{"text": "a"}', r"is no list of rows"),
        ("a.json", '[{"text": "a"},', r"a.json is no .json: Expecting value"),
        ("a.jsonl", '{"text": "a"}\n"words"', "row 2 is 'words'; a row has 'messages'"),
        ("a.parquet", "words", r"a.parquet is no .parquet: "),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)
    with pytest.raises(UserError, match="there is no such file"):
        read_rows(tmp_path / "b.jsonl")


def test_weights_are_of_the_targets(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (datum,) = examples(tokenizer, tmp_path).of_row(1, {"prompt": "ab", "completion": "c"})
    np.testing.assert_array_equal(datum.inputs["weights"], [0.0, 1.0, 1.0])
