import sqlite3
from contextlib import closing
from pathlib import Path

from skyrl_gym.envs.sql.parts import write_part


def test_parts_have_every_kind_of_table(tmp_path: Path) -> None:
    whole = tmp_path / "a ?#%b.sqlite"
    with closing(sqlite3.connect(whole)) as connection, connection:
        connection.executescript("""
            CREATE TABLE "odd ""name" ("a b" TEXT PRIMARY KEY, n INT, twice INT AS (2 * n)) WITHOUT ROWID;
            CREATE TABLE child (id INTEGER PRIMARY KEY AUTOINCREMENT, part_row TEXT REFERENCES "odd ""name");
            CREATE INDEX i ON child (part_row);
            CREATE VIEW v AS SELECT count(*) AS n FROM child;
        """)
        rows = [(f"{i:04}", i) for i in range(3000)]
        connection.executemany('INSERT INTO "odd ""name" ("a b", n) VALUES (?, ?)', rows)
        connection.executemany("INSERT INTO child (part_row) VALUES (?)", [(name,) for name, _ in rows[:7]])
        connection.execute("UPDATE child SET part_row = CAST(x'ff' AS TEXT) WHERE id = 2")
    parts = []
    for number in range(2):
        part = tmp_path / f"{number}.sqlite"
        write_part(whole, number, part)
        with closing(sqlite3.connect(part)) as connection:
            connection.text_factory = bytes
            assert connection.execute('SELECT count(*), max(twice) FROM "odd ""name"').fetchone() == (
                1000,
                2 * (1999 - number),
            )
            parts.append(connection.execute("SELECT part_row FROM child").fetchall())
            assert connection.execute("SELECT n FROM v").fetchone() == (len(parts[-1]),)
    assert sorted(map(len, parts)) == [3, 4]
    assert {name for (name,) in parts[0] + parts[1]} == {b"\xff", *(f"{i:04}".encode() for i in range(7) if i != 1)}
