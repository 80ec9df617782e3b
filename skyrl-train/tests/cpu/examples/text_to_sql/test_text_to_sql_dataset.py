import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.text_to_sql.databases import DATABASES, make_databases
from examples.text_to_sql.text_to_sql_dataset import QUESTIONS, main
from skyrl_gym.envs.sql.grading import has_order
from skyrl_train.dataset.files import read_rows


@pytest.fixture
def db_path(tmp_path: Path) -> Path:
    """A folder of databases with a small one of Spider and one of BIRD."""
    for file in ("spider/database/shop/shop.sqlite", "bird/train/train_databases/shop/shop.sqlite"):
        (tmp_path / "dbs" / file).parent.mkdir(parents=True)
        with closing(sqlite3.connect(tmp_path / "dbs" / file)) as connection, connection:
            connection.execute("CREATE TABLE goods (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, price REAL)")
            connection.execute("INSERT INTO goods (name, price) VALUES ('pen', 1.5), ('ink', 4.0)")
    return tmp_path / "dbs"


def solution(query: str) -> str:
    return f"<think>Now I know.</think>\n<solution>{query}</solution>"


def test_every_row_of_the_sample_can_be_played(prepare: Any, play: Any, tmp_path: Path) -> None:
    splits = prepare(main, "--source", "sample", "--db_path", str(tmp_path / "dbs"))
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 30, "validation": 7}
    databases = {"db_path": str(tmp_path / "dbs")}
    for row in splits["train"] + splits["validation"]:
        look = "<think>Which tables?</think><sql>SELECT name FROM sqlite_master</sql>"
        gold = row.env_extras["reward_spec"]["ground_truth"]
        assert play(row, look, solution(gold), **databases) == 1.0
        assert play(row, look, solution("SELECT 'wrong'"), **databases) == 0.0
        assert play(row, f"<solution>{gold}</solution>", **databases) == -1.0


def test_databases_are_written_beside_the_data_by_default(prepare: Any, play: Any, tmp_path: Path, capsys: Any) -> None:
    row = prepare(main, "--source", "sample")["train"][0]
    db_path = tmp_path / "data" / "databases"
    assert f"Train with environment.skyrl_gym.text2sql.db_path={db_path}\n" in capsys.readouterr().out
    assert play(row, solution(row.env_extras["reward_spec"]["ground_truth"]), db_path=str(db_path)) == 1.0


def test_no_answer_depends_on_unspecified_row_order_or_can_be_guessed(tmp_path: Path) -> None:
    """Answers are equal if SQLite scans rows in reverse, and if ties are ordered randomly."""
    files = {file.stem: file for file in make_databases(tmp_path)}
    questions = read_rows(str(QUESTIONS))
    assert sum(has_order(row["query"]) for row in questions) == 11
    for row in questions:
        with closing(sqlite3.connect(files[row["db_id"]])) as connection:
            rows = connection.execute(row["query"]).fetchall()
            connection.execute("PRAGMA reverse_unordered_selects = ON")
            reverse = connection.execute(row["query"]).fetchall()
            with_random_ties = re.sub(r"(ORDER BY [^()]+?)( LIMIT \d+)?$", r"\1, random()\2", row["query"])
            ordered = [connection.execute(with_random_ties).fetchall() for _ in range(20)]
        assert rows not in ([], [(0,)], [(1,)], [(None,)]), f"the answer can be guessed: {row}"
        if has_order(row["query"]):
            assert ", random()" in with_random_ties
            assert [rows] * 21 == [reverse, *ordered], row
        assert Counter(rows) == Counter(reverse), row


def test_databases_are_reproducible(tmp_path: Path) -> None:
    first, again = make_databases(tmp_path / "a"), make_databases(tmp_path / "b") and make_databases(tmp_path / "b")
    assert [file.stem for file in first] == list(DATABASES)
    for file, other in zip(first, again, strict=True):
        with closing(sqlite3.connect(file)) as connection, closing(sqlite3.connect(other)) as other_connection:
            assert list(connection.iterdump()) == list(other_connection.iterdump())
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not list(tmp_path.rglob("*.partial"))


SPIDER = {"db_id": "shop", "question": "How many goods are there?", "query": "SELECT count(*) FROM goods"}


def test_rows_of_spider_are_converted(prepare: Any, play: Any, source: Any, db_path: Path) -> None:
    """The rows have the columns of the Hub, including unused ones."""
    raw = source([SPIDER | {"query_toks": ["SELECT"], "question_toks": ["How"]}], [SPIDER])
    row = prepare(main, "--source", raw, "--db_path", str(db_path))["train"][0]
    (message,) = row.prompt
    assert message["role"] == "user"
    assert message["content"].endswith(
        "\n\nTables:\nCREATE TABLE goods (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT, price REAL);\n\n"
        "Question: How many goods are there?"
    )
    assert row.env_class == "text2sql"
    assert row.env_extras == {
        "data_source": "spider",
        "reward_spec": {"method": "rule", "ground_truth": "SELECT count(*) FROM goods"},
        "extra_info": {"split": "train", "index": 0},
        "db_id": "shop",
        "data": "spider",
    }
    assert play(row, solution("SELECT count(id) FROM goods"), db_path=str(db_path)) == 1.0


def test_rows_of_bird_are_converted(prepare: Any, play: Any, tmp_path: Path, db_path: Path) -> None:
    raw = {"db_id": "shop", "question": "How many?", "evidence": "ink is dear", "SQL": "SELECT count(*) FROM goods"}
    (tmp_path / "train.json").write_text(json.dumps([raw]))
    (tmp_path / "dev.json").write_text(json.dumps([raw]))
    row = prepare(main, "--source", str(tmp_path), "--db_path", str(db_path), "--data", "bird")["validation"][0]
    assert "What you should know:\nink is dear\n\nQuestion: How many?" in row.prompt[0]["content"]
    assert (row.data_source, row.env_extras["data"]) == ("bird", "bird")
    assert play(row, solution("SELECT count(id) FROM goods"), db_path=str(db_path)) == 1.0


def test_rows_in_the_columns_of_skyrl_keep_their_prompts(prepare: Any, source: Any) -> None:
    """The database is not read and may be missing."""
    row = {
        "data_source": "synsql",
        "prompt": [{"role": "system", "content": "Write SQL."}, {"role": "user", "content": "How many?"}],
        "env_class": "text2sql",
        "reward_spec": {"method": "rule", "ground_truth": "SELECT 1"},
        "db_id": "far_away",
        "data": "synsql",
    }
    kept = prepare(main, "--source", source([row], [row]))["train"][0]
    assert kept.prompt == row["prompt"]
    assert kept.env_extras == {
        **{name: row[name] for name in ("data_source", "reward_spec", "db_id", "data")},
        "extra_info": {"split": "train", "index": 0},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"db_id": None}, "it has no 'db_id'"),
        ({"question": None}, "it has no 'question'"),
        ({"query": None}, "it has no 'query'"),
        ({"data": "wikisql"}, "data='wikisql' is none of synsql, spider, bird"),
        ({"db_id": "gone"}, "there is no database {}/spider/database/gone/gone.sqlite; download those of spider, or"),
        ({"db_id": "torn"}, "cannot read the database {}/spider/database/torn/torn.sqlite: file is not a database"),
    ],
)
def test_invalid_rows_are_refused(
    change: dict[str, Any], message: str, source: Any, refuse: Any, db_path: Path
) -> None:
    torn = db_path / "spider/database/torn/torn.sqlite"
    torn.parent.mkdir()
    torn.write_text("no database " * 100)
    raw = source([SPIDER | change], [SPIDER])
    error = refuse(main, "--source", raw, "--db_path", str(db_path))
    assert f"row 0 of the train split of {raw}: {message.format(db_path)}" in error
