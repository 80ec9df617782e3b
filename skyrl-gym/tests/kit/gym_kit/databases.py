import sqlite3
from contextlib import closing
from pathlib import Path


def write_database(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(script)
        connection.commit()
    return file
