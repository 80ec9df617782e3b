import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast
from tx_kit.models import new_tokenizer

from tx.run.examples import ExampleBuilder, read_rows
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
"""A chat template that shows the thinking of the last reply only."""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def examples(tokenizer: PreTrainedTokenizerFast, folder: Path, max_length: int = 200) -> ExampleBuilder:
    tokenizer.save_pretrained(folder)
    return ExampleBuilder(folder, max_length)


def trained_text(tokenizer: PreTrainedTokenizerFast, datum: Datum) -> str:
    targets = datum.inputs["target_tokens"][datum.inputs["weights"] == 1.0]
    return str(tokenizer.decode(targets))


def test_replies_are_trained(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (datum,) = examples(tokenizer, tmp_path).convert(1, {"messages": CONVERSATION})
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode([datum.tokens[0], *datum.inputs["target_tokens"]]) == whole
    assert trained_text(tokenizer, datum) == "4<|im_end|>\n44<|im_end|>\n"


def test_a_reply_that_is_rendered_differently_later_has_its_own_sequence(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.chat_template = THINKING
    data = examples(tokenizer, tmp_path).convert(1, {"messages": CONVERSATION})
    assert [trained_text(tokenizer, one) for one in data] == ["4<|im_end|>", "44<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc"}, "bc<|im_end|>"),
        ({"prompt": "2+2=", "completion": "4"}, "4<|im_end|>"),
        ({"prompt": CONVERSATION[:3], "completion": "44"}, "44<|im_end|>\n"),
        ({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, "44<|im_end|>\n"),
        ({"messages": None, "prompt": None, "completion": None, "text": "abc"}, "bc<|im_end|>"),
        ({"messages": None, "prompt": "2+2=", "completion": "4", "text": None}, "4<|im_end|>"),
    ],
)
def test_row_formats(tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    (datum,) = examples(tokenizer, tmp_path).convert(1, row)
    assert trained_text(tokenizer, datum) == expected


def test_long_rows_are_truncated(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (datum,) = examples(tokenizer, tmp_path, max_length=3).convert(1, {"text": "abcdef"})
    assert len(datum.tokens) == 3
    assert trained_text(tokenizer, datum) == "bcd"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": None, "question": "x"}, r"row 7: it has question; a row has 'messages'"),
        ({"messages": CONVERSATION[:1]}, "row 7: there is no assistant message"),
        ({"messages": [{"content": "x"}]}, "row 7: 'role'"),
        ({"messages": 3}, "row 7: 'int' object is not iterable"),
        ({"prompt": "x" * 300, "completion": "y"}, r"row 7: no trained token within --max-length 200"),
    ],
)
def test_unknown_row_formats(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        examples(tokenizer, tmp_path).convert(7, row)


def test_a_row_that_the_chat_template_refuses(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match="row 7: the chat template refuses it: System role not supported; correct"):
        examples(tokenizer, tmp_path).convert(7, {"messages": CONVERSATION})


def test_file_formats(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "ü"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [read_rows(tmp_path / name) for name in ("a.jsonl", "a.json", "a.parquet")] == [rows] * 3


def test_strings_may_contain_other_line_separators(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\n', encoding="utf-8", newline="")
    assert read_rows(tmp_path / "a.jsonl") == [{"text": "a\u2028b\u0085c"}, {"text": "d"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"line 2: Expecting value"),
        ("a.jsonl", "\n", "has no rows"),
        ("a.json", '{"text": "a"}', r"is not a list of rows"),
        ("a.json", '[{"text": "a"},', r"a.json is not a valid .json file: Expecting value"),
        ("a.jsonl", '{"text": "a"}\n"words"', "row 2 is 'words'; a row has 'messages'"),
        ("a.parquet", "words", r"a.parquet is not a valid .parquet file: "),
    ],
)
def test_invalid_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)
    with pytest.raises(UserError, match="file not found"):
        read_rows(tmp_path / "b.jsonl")
