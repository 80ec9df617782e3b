"""Test databases: SQLite files, and a temporary PostgreSQL server if PostgreSQL is installed.

TX_TEST_DATABASE_URL names a PostgreSQL server to use instead, whose user may create databases; then all test servers
keep their state there.
"""

import getpass
import hashlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, create_engine, make_url, text

TEST_URL = "TX_TEST_DATABASE_URL"
ABSENT = "PostgreSQL is not installed here (no initdb): what is particular to it is not tested"
SECONDS_TO_START = 30


def find_programs() -> Path | None:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((one.parent for one in installed), key=lambda folder: float(folder.parent.name), default=None)


@contextmanager
def postgresql(bin_folder: Path) -> Iterator[str]:
    """Run a server that listens only on a socket in its folder; yield its URL."""
    is_root = os.getuid() == 0
    user = "postgres" if is_root else getpass.getuser()  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="tx-postgresql-"))
    shutil.chown(folder, user)
    data, log = folder / "data", folder / "log"
    settings = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off", "max_connections": 200}
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    started: dict[str, Any] = {
        "user": pwd.getpwnam(user).pw_uid if is_root else None,
        "env": {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "America/St_Johns"},  # a zone in which no error goes unnoticed
        "cwd": "/",
    }
    try:
        command = (bin_folder / "initdb", "--auth=trust", "--no-sync", "--encoding=UTF8", "-D", data)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **started)
        with log.open("wb") as output:
            command = (bin_folder / "postgres", "-D", data, *options)
            server = subprocess.Popen(command, stdout=output, stderr=output, **started)
        try:
            deadline = time.monotonic() + SECONDS_TO_START
            while b"ready to accept connections" not in log.read_bytes() or not (folder / ".s.PGSQL.5432").exists():
                assert server.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            yield str(URL.create("postgresql", username=user, database="postgres", query={"host": str(folder)}))
        finally:
            server.send_signal(signal.SIGINT)  # stop without waiting for clients
            server.wait(SECONDS_TO_START)
    finally:
        shutil.rmtree(folder)


def database_url(server_url: str, name: str) -> str:
    """Return the URL of a database on the server; create it on first use."""
    server = make_url(server_url)
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        known = connection.execute(text("SELECT 1 FROM pg_database WHERE datname = :name"), {"name": name})
        if known.first() is None:
            connection.exec_driver_sql(f'CREATE DATABASE "{name}" TEMPLATE template0')
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


def new_database_url(server_url: str) -> str:
    return database_url(server_url, f"tx_{secrets.token_hex(8)}")


def url_for(folder: Path) -> str:
    """Return the URL of a folder's database on the server of TX_TEST_DATABASE_URL; empty without one."""
    server = os.environ.get(TEST_URL)
    name = f"tx_{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
    return database_url(server, name) if server else ""
