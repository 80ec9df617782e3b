import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
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


def convert(folder: Path, row: dict[str, Any], *, template: str | None = None) -> list[Datum]:
    """Convert row 7 with a tokenizer and a chat template."""
    tokenizer = new_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return ExampleBuilder(folder, max_length=200).convert(7, row)


def trained_text(datum: Datum) -> str:
    return str(new_tokenizer().decode(datum.inputs["target_tokens"][datum.inputs["weights"] == 1.0]))


def test_replies_are_trained(tmp_path: Path) -> None:
    tokenizer = new_tokenizer()
    (datum,) = convert(tmp_path, {"messages": CONVERSATION})
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode([datum.tokens[0], *datum.inputs["target_tokens"]]) == whole
    assert trained_text(datum) == "4<|im_end|>\n44<|im_end|>\n"


def test_a_reply_that_is_rendered_differently_later_has_its_own_sequence(tmp_path: Path) -> None:
    data = convert(tmp_path, {"messages": CONVERSATION}, template=THINKING)
    assert [trained_text(one) for one in data] == ["4<|im_end|>", "44<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abc"}, "bc<|im_end|>"),
        ({"prompt": "2+2=", "completion": "4"}, "4<|im_end|>"),
        ({"prompt": CONVERSATION[:3], "completion": "44"}, "44<|im_end|>\n"),
        ({"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}, "44<|im_end|>\n"),
        ({"messages": None, "prompt": None, "completion": None, "text": "abc"}, "bc<|im_end|>"),
        ({"messages": None, "prompt": "2+2=", "completion": "4", "text": None}, "4<|im_end|>"),
        ({"text": "x" * 150 + "abcdef" * 50}, "x" * 149 + "abcdef" * 8 + "abc"),  # truncated to 200 tokens and a target
    ],
)
def test_row_formats(tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    (datum,) = convert(tmp_path, row)
    assert trained_text(datum) == expected


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        ({"messages": None, "question": "x"}, None, r"row 7: its columns are question; a row has 'messages'"),
        ({"messages": None}, None, r"row 7: its columns are empty; a row has 'messages'"),
        ({"messages": CONVERSATION[:1]}, None, "row 7: no assistant message to train on; end the row with one$"),
        ({"messages": [{"content": "x"}]}, None, "row 7: a message has no 'role'; add it$"),
        ({"messages": 3}, None, "row 7: 'int' object is not iterable; a row has 'messages'"),
        ({"prompt": "x" * 300, "completion": "y"}, None, r"row 7: no trained token within --max-length 200"),
        (
            {"messages": CONVERSATION},
            "{{ raise_exception('System role not supported') }}",
            "row 7: the chat template rejects it: System role not supported; correct",
        ),
        (
            {"messages": CONVERSATION},
            "{{ 'reply:' if add_generation_prompt else messages[-1].content }}",
            "row 7: the chat template starts a reply without its generation prompt; use another template$",
        ),
    ],
)
def test_unusable_rows(tmp_path: Path, row: dict[str, Any], template: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert(tmp_path, row, template=template)


def test_file_formats(tmp_path: Path) -> None:
    """Strings may contain other line separators."""
    rows = [{"text": "a"}, {"text": "ü\u2028b\u0085c"}]
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "a.jsonl").write_text(f"{lines}\n\n", encoding="utf-8", newline="")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [read_rows(tmp_path / name) for name in ("a.jsonl", "a.json", "a.parquet")] == [rows] * 3


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
