import json
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_gym.data import jsonl
from skyrl_gym.data.files import RowSource, open_file
from skyrl_gym.data.jsonl import JSONLines
from skyrl_gym.error import ChangedData, UnreadableData

BLANK = ["", " ", "\t\t", "  \r", "\x0c", " \x0b"]
VALUES = st.sampled_from(['{"a": 1}', '  {"b": [1, 2]} ', '{"é": "\\u00e9"}\r', '{"c": "x"}'])


def open_rows(path: Path) -> RowSource:
    return open_file(path.name, path, "--data")


@given(
    lines=st.lists(st.sampled_from(BLANK) | VALUES, max_size=12),
    ends=st.booleans(),
    chunk_bytes=st.integers(1, 40),
    in_memory=st.booleans(),
)
def test_values_are_those_of_the_lines_that_are_not_blank(
    lines: list[str], ends: bool, chunk_bytes: int, in_memory: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(jsonl, "BLOCK_ROWS", 2)
        patch.setattr(jsonl, "MAX_BYTES_IN_MEMORY", 1000 if in_memory else -1)
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(("\n".join(lines) + "\n" * ends).encode())
        expected = [json.loads(line) for line in lines if line.strip()]
        values = JSONLines(path)
        assert len(values) == len(expected)
        assert [value for value, _ in values.read(range(len(values)))] == expected
        chosen = sorted(random.Random(len(lines)).sample(range(len(values)), len(values) // 2))
        assert [value for value, _ in values.read(chosen)] == [expected[i] for i in chosen]


def test_a_changed_file_is_noticed_unless_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    small = open_rows(path)
    monkeypatch.setattr(jsonl, "MAX_BYTES_IN_MEMORY", 0)
    large = open_rows(path)
    replaced = tmp_path / "new.jsonl"
    replaced.write_text('{"a": 3}\n')
    replaced.replace(path)  # the opened file still exists
    assert list(small.read([1])) == list(large.read([1])) == [{"a": 2}]
    large = open_rows(path)
    path.write_text('{"b": 4}\n')
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedData, match=r"rows\.jsonl changed while it was used; restore it"):
        list(large.read([0]))
    assert list(open_rows(path).read([0])) == [{"b": 4}]


@pytest.mark.parametrize(
    ("name", "text"), [("rows.jsonl", '{"a": 1}\n{"a": 2}\n'), ("rows.json", '[{"a": 1}, {"a": 2}]')]
)
def test_a_byte_order_mark_is_ignored(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8-sig")
    assert list(open_rows(path).read_column("a")) == [1, 2]


def test_no_file_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(open_rows(path)) == 1
    assert len(os.listdir("/proc/self/fd")) == n_open


def test_the_line_of_an_error_counts_blank_lines_of_other_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "CHUNK_BYTES", 5)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\n  {"a" 3}\n')
    rows = open_rows(path)
    assert list(rows.read([1])) == [{"a": 2}]
    with pytest.raises(UnreadableData, match=r"rows\.jsonl: line 5 is not JSON: Expecting ':' delimiter at column 8"):
        list(rows.read([2]))
