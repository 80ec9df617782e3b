"""Ask a SQLite database what somebody else wrote, which can neither change the database nor leave it.

SQLite looks at the clock only between the steps of a query, and a step may take for ever or all memory: queries run in
worker processes with limits. POSIX only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_gym.queries.values import from_json
from skyrl_gym.worker_pool import Pool

MAX_WORKERS = min(8, os.cpu_count() or 1)
GRACE_SECONDS = 1.0  # for a worker to end a query by itself, and for its answer to arrive

_pool = Pool("skyrl_gym.queries", MAX_WORKERS)


class QueryError(Exception):
    """A query that SQLite refuses, or that takes more than it may."""


class QueryTimeout(QueryError):
    """A query that takes too long."""


@dataclass(frozen=True, slots=True)
class Table:
    """The result of a query, in its order."""

    columns: Sequence[str]
    rows: Sequence[tuple[Any, ...]]


def run_query(file: Path, sql: str, timeout: float) -> Table:
    """The answer of the database in `file`, which is opened for reading only; `timeout` in seconds. Any thread may ask.

    Raises:
        FileNotFoundError: there is no such file.
        QueryTimeout: it takes longer. Waiting for a free worker is not counted.
        QueryError: anything else that is wrong with the query.
        RuntimeError: a worker does not start, or `close` was called meanwhile.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive number of seconds")
    if not file.is_file():
        raise FileNotFoundError(f"there is no database {file}")
    for _ in range(2):  # a worker may be killed for reasons that are not the query's
        try:
            answer = _pool.ask([str(file.resolve()), sql, timeout], timeout + GRACE_SECONDS)
        except TimeoutError as error:
            raise QueryTimeout(_too_long(timeout)) from error
        except ConnectionError:
            continue
        if "rows" in answer:
            return Table(answer["columns"], [tuple(map(from_json, row)) for row in answer["rows"]])
        if answer["is_timeout"]:
            raise QueryTimeout(_too_long(timeout))
        raise QueryError(answer["error"])
    raise QueryError("it took more time or memory than it may")


def close() -> None:
    """End all workers, those at work too. It is called at exit; the next query starts new ones."""
    _pool.close()


def _too_long(timeout: float) -> str:
    return f"it took longer than {timeout:g} seconds"
