"""Untrusted queries on a SQLite database, read-only and without access to anything else.

SQLite checks the time only between the steps of a query, but a single step may take forever or use all memory. So
queries run in worker processes with limits. POSIX only.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_gym.queries.values import from_json
from skyrl_gym.worker_pool import Pool

MAX_WORKERS = min(8, os.cpu_count() or 1)
GRACE_SECONDS = 1.0  # for a worker to interrupt the query itself and answer

_pool = Pool("skyrl_gym.queries", MAX_WORKERS)


class QueryError(Exception):
    """A query that SQLite rejects, or that exceeds a limit."""


class QueryTimeout(QueryError):
    """A query that exceeds its time limit."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a query."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]


def run_query(file: Path, sql: str, timeout: float) -> Table:
    """Run a query on the database in `file`, opened read-only, with a `timeout` in seconds. Thread-safe.

    Raises:
        FileNotFoundError: the file does not exist.
        QueryTimeout: the query takes longer. Waiting for a free worker does not count.
        QueryError: the query fails for any other reason.
        RuntimeError: a worker does not start, or `close` was called meanwhile.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if not file.is_file():
        raise FileNotFoundError(f"the database {file} does not exist")
    for _ in range(2):  # a worker may be killed for reasons unrelated to the query
        try:
            answer = _pool.ask([str(file.resolve()), sql, timeout], timeout + GRACE_SECONDS)
        except TimeoutError as error:
            raise QueryTimeout(_timeout_message(timeout)) from error
        except ConnectionError:
            continue
        if "rows" in answer:
            return Table(answer["columns"], [tuple(map(from_json, row)) for row in answer["rows"]])
        if answer["is_timeout"]:
            raise QueryTimeout(_timeout_message(timeout))
        raise QueryError(answer["error"])
    raise QueryError("it exceeded its time or memory limit")


def close() -> None:
    """End all workers, including busy ones. Called at exit. The next query starts new workers."""
    _pool.close()


def _timeout_message(timeout: float) -> str:
    return f"it took longer than {timeout:g} seconds"
