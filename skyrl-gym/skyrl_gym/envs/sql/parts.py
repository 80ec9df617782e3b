"""Parts of a database: a query that reads the data gives a different result on each."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

N_PARTS = 2
MAX_ROWS = 1000
"""Maximum number of rows of a table in a part."""


def write_part(db_file: Path, part: int, target: Path) -> None:
    """Write a copy of `db_file` with its tables and views, but only every second row, starting at row `part`.

    Raises:
        sqlite3.Error: a table cannot be copied, e.g. because its extension is missing.
    """
    with closing(sqlite3.connect(target.as_uri(), uri=True)) as connection, connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("ATTACH ? AS source", (f"file:{quote(str(db_file.resolve()))}?mode=ro",))
        schema = connection.execute(
            "SELECT type, name, sql FROM source.sqlite_schema WHERE type IN ('table', 'view') "
            "AND substr(name, 1, 7) != 'sqlite_' ORDER BY type"
        )
        for kind, name, statement in schema.fetchall():
            connection.execute(statement)
            if kind == "table":
                _copy_rows(connection, name, part)


def _copy_rows(connection: sqlite3.Connection, table: str, part: int) -> None:
    info = connection.execute("SELECT name FROM pragma_table_xinfo(?, 'source') WHERE hidden = 0", (table,))
    names = [name for (name,) in info.fetchall()]  # of the stored columns, without generated ones
    columns, number = ", ".join(map(_quote, names)), _quote("".join(names) + "#")
    first = f"SELECT {columns} FROM source.{_quote(table)} LIMIT ?"
    numbered = f"SELECT *, row_number() OVER () AS {number} FROM ({first})"
    connection.execute(
        f"INSERT INTO main.{_quote(table)} ({columns}) SELECT {columns} FROM ({numbered}) WHERE {number} % ? = ?",
        (N_PARTS * MAX_ROWS, N_PARTS, part),
    )


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
