import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from train_kit.datasets import prompt_row, write_rows

from skyrl_train.dataset.files import JoinedRows, read_rows, write_jsonl
from skyrl_train.errors import DataError

ROWS = [prompt_row("Wie geht’s?", extra_info={"index": 0}), prompt_row("two\nlines", extra_info={"index": 1})]


def test_home_and_variables_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ROWS_NAME", "rows")
    assert read_rows("~/rows.jsonl") == read_rows("$HOME/${ROWS_NAME}.jsonl") == ROWS


def test_a_missing_file_is_named_by_its_expanded_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=rf"{tmp_path}/train\.parquet does not exist; check data\.train_data"):
        read_rows("~/train.parquet")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(DataError, match=r"folder\.json is a folder; check data\.train_data"):
        read_rows(str(tmp_path / "folder.json"))
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(DataError, match=r"pipe\.json is not a regular file"):
        read_rows(str(tmp_path / "pipe.json"))
    with pytest.raises(DataError, match="is a URL, not a local file"):
        read_rows("s3://bucket/train.parquet")
    with pytest.raises(DataError, match="cannot be opened"):
        read_rows("a" * 5000 + ".json")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.parquet", b"not parquet", "cannot read dataset file .*rows.parquet: "),
        ("rows.json", b"", "cannot read dataset file .*rows.json: "),
        ("rows.json", b'{"prompt":\n []}', "expected a list of rows, or one object a line, found dict"),
        ("rows.json", b'["a prompt"]', "row 0 of .*rows.json is 'a prompt'; a row is an object"),
        ("rows.jsonl", b'{"a": 1}\n\n{"a": \n', "line 3 is not JSON: .* at column"),
        ("rows.jsonl", b'{"a": 1}\n5\n', "row 1 of .*rows.jsonl is 5; a row is an object"),
        ("rows.jsonl", b'{"a": "\xff"}\n', "cannot read dataset file .*rows.jsonl: .*utf-8"),
        pytest.param("rows.json", b"[" * 10**5, "rows.json: its JSON is nested too deeply", id="deep-list"),
        pytest.param("rows.jsonl", b'{"a": ' + b"[" * 10**5, "rows.jsonl: line 1 is nested too deeply", id="deep-line"),
    ],
)
def test_an_unreadable_file_is_refused_with_the_reason(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        read_rows(str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:test", ("openai/gsm8k", None, "test")),
        ("openai/gsm8k/main", ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k/main:test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k/main:train[:10%]", ("openai/gsm8k", "main", "train[:10%]")),
        ("gsm8k:test", ("gsm8k", None, "test")),
        ("a/b/c/d:test", ("a/b/c/d", None, "test")),
        ("/gsm8k/main:test", ("/gsm8k/main", None, "test")),
    ],
)
def test_any_other_name_is_loaded_from_the_hub(
    source: str, arguments: tuple[str, str | None, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
        assert (path, name, split) == arguments
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert read_rows(source) == ROWS


def test_a_local_folder_is_not_parsed_as_a_hub_name_with_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my/own/data").mkdir(parents=True)
    write_rows(tmp_path / "my/own/data", ROWS, "test.jsonl")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    assert read_rows("my/own/data:test") == read_rows(str(tmp_path / "my/own/data:test")) == ROWS


def test_without_the_hub_the_error_names_the_dataset_and_the_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"cannot load 'no-one/rows\.csv': .*must end in \.parquet, \.json or \.jsonl"):
        read_rows("no-one/rows.csv")
    with pytest.raises(DataError, match=r"cannot load 'openai/gsm8k/main:test' .*owner/name/config:split"):
        read_rows("openai/gsm8k/main:test")


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [*ROWS, {"folder": tmp_path}])
    assert read_rows(str(path)) == [*ROWS, {"folder": str(tmp_path)}]
    assert "Wie geht’s?" in path.read_text(encoding="utf-8")


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [{"a": 1}])

    def rows() -> Iterator[dict[str, int]]:
        yield {"a": 2}
        assert read_rows(str(path)) == [{"a": 1}]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(path, rows())
    assert read_rows(str(path)) == [{"a": 1}]
    write_jsonl(path, [{"a": 3}])
    assert read_rows(str(path)) == [{"a": 3}]
    assert list(tmp_path.iterdir()) == [path]


def test_lone_surrogates_are_replaced_with_one_warning_per_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"response": "whole"}\n{"response": "half \\ud83d"}\n')
    for _ in range(2):
        rows = list(JoinedRows([str(path)]).read(range(2)))
    assert rows == [(f"row 0 of {path}", {"response": "whole"}), (f"row 1 of {path}", {"response": "half ?"})]
    (warning,) = caplog.messages
    assert (
        warning == f'row 1 of {path} has lone surrogates (halves of characters), which are replaced by "?" in all rows'
    )


def test_rows_of_several_sources_are_joined_and_read_by_index(tmp_path: Path) -> None:
    names = [write_rows(tmp_path, ROWS, name) for name in ("a.parquet", "b.json", "c.jsonl")]
    rows = JoinedRows(names)
    assert len(rows) == 6
    assert [row for _, row in rows.read(range(6))] == ROWS * 3
    assert list(rows.read([1, 2, 5])) == [
        (f"row 1 of {names[0]}", ROWS[1]),
        (f"row 0 of {names[1]}", ROWS[0]),
        (f"row 1 of {names[2]}", ROWS[1]),
    ]
    assert rows[3] == ROWS[1]
    assert list(rows.read_column("extra_info")) == [row["extra_info"] for row in ROWS] * 3
    assert list(rows.read_column("missing")) == [None] * 6


def test_the_digest_of_a_table_depends_on_its_rows_and_not_on_their_storage(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{"a": i, "b": [str(i)], "c": None if i % 3 else "x"} for i in range(2500)])
    for name, options in (("a", {}), ("b", {"row_group_size": 7, "compression": "gzip"})):
        pq.write_table(table, tmp_path / f"{name}.parquet", **options)
    pq.write_table(table.slice(1), tmp_path / "c.parquet")
    digests = [JoinedRows([str(tmp_path / f"{name}.parquet")]).digest for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_a_deep_column_of_parquet_is_refused(tmp_path: Path) -> None:
    kind = pa.string()
    for _ in range(70):
        kind = pa.struct({"x": kind})
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"deep": pa.array([None], kind)}), path)
    with pytest.raises(DataError, match=f"the column deep of {path} is nested too deeply"):
        JoinedRows([str(path)])


def test_bytes_of_parquet_that_are_not_utf8_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    offsets, text = pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xffa")
    pq.write_table(pa.table({"data_source": pa.StringArray.from_buffers(2, offsets, text)}), path)
    rows = JoinedRows([str(path)])
    for read in (lambda: rows[0], lambda: list(rows.read_column("data_source"))):
        with pytest.raises(DataError, match=rf"cannot read (one of the 2 rows starting at )?row 0 of {path}"):
            read()


@pytest.mark.parametrize(
    ("lengths", "max_rows", "n_sampled"),
    [
        ([10], None, [10]),
        ([10], 10, [10]),
        ([1000, 3, 40], 24, [11, 3, 10]),  # a small source is in the sample as a whole
        ([5, 5, 5], 2, [0, 1, 1]),
    ],
)
def test_a_sample_is_the_same_each_time_and_has_rows_of_each_source(
    tmp_path: Path, lengths: list[int], max_rows: int | None, n_sampled: list[int]
) -> None:
    sources = [str(tmp_path / f"{i}.jsonl") for i in range(len(lengths))]
    for source, length in zip(sources, lengths, strict=True):
        write_jsonl(Path(source), [{"source": source}] * length)
    rows = JoinedRows(sources)
    sample = list(rows.sample(max_rows))
    assert sample == sorted(set(sample)) == list(JoinedRows(sources).sample(max_rows))
    counts = Counter(row["source"] for _, row in rows.read(sample))
    assert [counts[source] for source in sources] == n_sampled


def test_a_sample_is_not_the_beginning_of_a_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [{}] * 1000)
    sample = JoinedRows([str(tmp_path / "rows.jsonl")]).sample(20)
    assert len(sample) == 20
    assert sample[0] < 200
    assert sample[-1] > 800


MESSAGES = [
    {"role": "user", "content": "a", "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": None, "function": {"name": "f", "arguments": {"x": None}}}],
    },
]
CLEAN = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "lines.json"])
def test_messages_of_every_file_lose_their_null_fields(tmp_path: Path, name: str) -> None:
    row = {"prompt": MESSAGES, "answers": [None, 1], "spec": {"note": None}}
    if name == "lines.json":  # one object a line, as Hugging Face's datasets write it
        (tmp_path / name).write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
        assert len(read_rows(str(tmp_path / name))) == 2
    else:
        write_rows(tmp_path, [row], name)
    assert read_rows(str(tmp_path / name))[0] == {**row, "prompt": CLEAN}


def test_maps_of_parquet_are_objects(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    path = tmp_path / "rows.parquet"
    table = {
        "spec": pa.array([[("method", "rule"), ("truth", "42")]], kind),
        "all": pa.array([[[("a", "b")]]], pa.list_(kind)),
    }
    pq.write_table(pa.table(table), path)
    assert read_rows(str(path)) == [{"spec": {"method": "rule", "truth": "42"}, "all": [{"a": "b"}]}]
    pq.write_table(pa.table({"spec": pa.array([[("a", "b"), ("a", "c")]], kind)}), path)
    with pytest.raises(DataError, match="cannot read row 0 of "):
        read_rows(str(path))


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "splits")
    assert read_rows(str(tmp_path / "plain")) == read_rows(f"{tmp_path}/splits:test") == saved.to_list()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_rows("~/plain") == read_rows("$HOME/splits:test") == saved.to_list()
    with pytest.raises(DataError, match="it has the splits test"):
        read_rows(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="it has no splits, only 2 rows; remove :test"):
        read_rows(f"{tmp_path}/plain:test")
