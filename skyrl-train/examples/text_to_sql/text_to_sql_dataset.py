"""Write the text-to-SQL dataset: questions about databases, each to answer with one query.

    python -m examples.text_to_sql.text_to_sql_dataset --output_dir ~/data/sql --db_path ~/data/sql/databases

reads the questions of Spider from the Hub. Its databases are not there: put them below `--db_path`, as
``spider/database/<db_id>/<db_id>.sqlite``. The prompts contain their schemas. `--source sample` creates three small
databases there with 37 questions about them. They are enough for first runs and tests, but not a benchmark. In both
cases, train with ``environment.skyrl_gym.text2sql.db_path`` set to the same folder.

Raw rows have `db_id`, `question` and the reference query, in the column of Spider (`query`), BIRD (`SQL`) or SynSQL
(`sql`). `--data` names the set of `--source PATH`. Rows with SkyRL's columns keep their prompts.
"""

import functools
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from examples.prepare import HubSplit, Preparation, command_line, field, prepare, prompt_field, row_schema
from examples.text_to_sql.databases import DATA, make_databases
from skyrl_gym.data.files import Row
from skyrl_gym.envs.sql.env import FOLDERS
from skyrl_gym.queries import QueryError, run_query
from skyrl_train.dataset.files import read_rows
from skyrl_train.errors import DataError

HUB = (HubSplit("xlangai/spider", "train"), HubSplit("xlangai/spider", "validation"))
SCHEMA = row_schema({"index": pa.int64()}, db_id=pa.string(), data=pa.string())
QUESTIONS = Path(__file__).with_name("questions.jsonl")
QUERY_FIELDS = ("query", "SQL", "sql")
HINT_FIELDS = ("evidence", "external_knowledge")
READ_SCHEMA = "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
SECONDS = 30.0

INSTRUCTION = """\
Answer a question with one query to the SQLite database that is described below.

Before anything else think, between <think> and </think>. If you want to look at the data or to try a query, write it \
between <sql> and </sql>; you will be shown its result between <observation> and </observation>. Begin what you write \
after a result with a thought between <think> and </think> again. When you are sure, write the query between \
<solution> and </solution>, once, and end with it. It must return the columns that the question asks for, in that \
order, and no others.
"""


def dataset_row(raw: Row, split: str, index: int, db_path: Path, data: str) -> Row:
    """Return a question's row. `data` is the default database set."""
    db_id, data = field(raw, "db_id", str), raw.get("data") or data
    if data not in FOLDERS:
        raise DataError(f"data={data!r} is none of {', '.join(FOLDERS)}")
    if raw.get("reward_spec") is not None:
        prompt, query = prompt_field(raw), field(field(raw, "reward_spec", dict), "ground_truth", str)
    else:
        prompt = [{"role": "user", "content": question_text(raw, schema_of(db_path, data, db_id))}]
        query = field(raw, next((name for name in QUERY_FIELDS if raw.get(name)), QUERY_FIELDS[0]), str)
    return {
        "data_source": raw.get("data_source") or data,
        "prompt": prompt,
        "env_class": "text2sql",
        "reward_spec": {"method": "rule", "ground_truth": query},
        "extra_info": {"split": split, "index": index},
        "db_id": db_id,
        "data": data,
    }


def question_text(raw: Row, schema: str) -> str:
    """Return the instruction, the tables and the question."""
    hint = next((raw[name] for name in HINT_FIELDS if raw.get(name)), None)
    known = f"\nWhat you should know:\n{hint}\n" if hint else ""
    return f"{INSTRUCTION}\nTables:\n{schema}\n{known}\nQuestion: {field(raw, 'question', str)}"


@functools.cache
def schema_of(db_path: Path, data: str, db_id: str) -> str:
    """Return the statements that create a database's tables. Raise DataError if the database is missing."""
    file = db_path / FOLDERS[data] / db_id / f"{db_id}.sqlite"
    try:
        return "\n".join(f"{sql};" for (sql,) in run_query(file, READ_SCHEMA, SECONDS).rows)
    except FileNotFoundError as error:
        raise DataError(f"there is no database {file}; download those of {data}, or set --db_path") from error
    except QueryError as error:
        raise DataError(f"cannot read the database {file}: {error}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = command_line(__doc__, "sql")
    add = parser.add_argument
    add("--db_path", type=Path, help="folder of all databases; %(default)s means databases/ in --output_dir")
    add("--data", choices=FOLDERS, default=DATA, help="database set of raw rows without the column `data`")
    args = parser.parse_args(argv)
    db_path = (args.db_path or args.output_dir / "databases").expanduser().resolve()

    def sample(seed: int) -> list[Row]:
        make_databases(db_path)
        return [row | {"data_source": "sample_text2sql", "data": DATA} for row in read_rows(str(QUESTIONS))]

    def convert(raw: Row, split: str, index: int) -> Row:
        return dataset_row(raw, split, index, db_path, args.data)

    prepare(Preparation(SCHEMA, convert, sample, HUB), parser, args)
    print(f"Train with environment.skyrl_gym.text2sql.db_path={db_path}")


if __name__ == "__main__":
    main()
