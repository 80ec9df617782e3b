import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gym_kit.messages import user
from gym_kit.processes import run_python
from PIL import Image

from skyrl_gym.checkup.rows import read_row, split_row
from skyrl_gym.error import UnreadableData

ROWS: list[dict[str, Any]] = [
    {"prompt": user("6 * 7?"), "env_class": "multiply", "reward_spec": {"ground_truth": "42"}},
    {"prompt": user("Hi\u2028!"), "env_class": "talk", "max_turns": 3, "extra_info": {"n": [1]}},
]


MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(MESSAGE)),
        ("env_class", pa.string()),
        ("reward_spec", pa.struct([("ground_truth", pa.string())])),
        ("max_turns", pa.int64()),
        ("extra_info", pa.struct([("n", pa.list_(pa.int64()))])),
    ]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS, schema=SCHEMA), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS))
    return tmp_path


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_row_is_the_same_in_every_file_format(folder: Path, kind: str) -> None:
    for index, expected in enumerate(ROWS):
        row = read_row(folder / f"rows.{kind}", index)
        assert {name: value for name, value in row.items() if value is not None} == expected
        assert row.keys() == (set(SCHEMA.names) if kind == "parquet" else expected.keys())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "6 * 7?"}, r"prompt='6 \* 7\?' is not a list of messages; use \[\{"),
        ({"prompt": ["6 * 7?"]}, "is not a list of messages"),
        ({"max_turns": 0}, "must be at least 1"),
        ({"max_turns": "3"}, "max_turns='3' must be a whole number"),
    ],
)
def test_row_that_training_would_refuse_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_row(row)


@pytest.mark.parametrize(
    ("name", "text", "index", "message"),
    [
        ("rows.csv", "a,b", 0, r"rows\.csv is not supported; use a \.parquet, \.json or \.jsonl file"),
        ("rows.json", "5", 0, r"rows\.json: expected a list of rows, or one object a line, found int"),
        ("rows.jsonl", '{"a": 1}\n{', 1, r"rows\.jsonl: line 2 is not JSON"),
        ("rows.jsonl", "1", 0, r"row 0 of .*rows\.jsonl is 1; a row is an object"),
        ("rows.jsonl", "{}", 1, r"--row 1: .* has rows 0 to 0"),
        ("rows.jsonl", "{}", -1, r"--row -1: .* has rows 0 to 0"),
        ("rows.json", "[]", 0, r"--row 0: .* has no rows"),
        ("rows.parquet", "PAR2", 0, r"cannot read dataset file .*rows\.parquet: "),
    ],
)
def test_unusable_file_is_explained(tmp_path: Path, name: str, text: str, index: int, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises((UnreadableData, ValueError), match=message):
        read_row(tmp_path / name, index)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableData, match=r"rows\.parquet does not exist; check --data"):
        read_row(tmp_path / "rows.parquet", 0)


def test_missing_pyarrow_names_the_command_that_installs_it(folder: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "os.chdir(sys.argv[1])\n"
        "sys.modules['pyarrow'] = None\n"  # as where it is not installed
        "from skyrl_gym.checkup.rows import read_row\n"
        "try:\n    read_row(pathlib.Path('rows.parquet'), 0)\n"
        "except ImportError as error:\n    print(error)\n"
        "print(read_row(pathlib.Path('rows.json'), 0)['env_class'])\n"
    )
    problem, env_class = run_python(program, str(folder)).stdout.splitlines()
    assert problem == ("rows.parquet: reading .parquet needs pyarrow, which is not installed; run pip install pyarrow")
    assert env_class == "multiply"


def test_row_is_read_as_in_training(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "6 * 7?", "name": None}], "note": "half \ud83d"}
    path = tmp_path / "lines.json"  # one object a line, as Hugging Face's datasets write it
    path.write_text(f"{json.dumps({})}\n{json.dumps(row)}\n", encoding="utf-8-sig")
    assert read_row(path, 1) == {"prompt": user("6 * 7?"), "note": "half ?"}


def test_images_of_a_column_are_in_the_prompt_as_in_training(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2), "red").save(tmp_path / "ball.png")
    row = {"prompt": user("<image>Where is it?"), "images": ["ball.png"]}
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    prompt, extras = split_row(read_row(tmp_path / "rows.json", 0))
    image, text = prompt[0]["content"]
    assert (image["image"].width, image["image"].height) == (3, 2)
    assert text == {"type": "text", "text": "Where is it?"}
    assert "images" not in extras
