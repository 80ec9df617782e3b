"""No request breaks the server, which runs in a separate process.

Nothing causes a server error, a hang or memory growth, and other users' data stay as they were.
"""

import http.client
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine as Database
from sqlmodel import select
from tx_kit.fuzz import Post, Surface, fuzzed, n_requests, posts, settle, valid_bodies
from tx_kit.processes import ServerProcess, process
from tx_kit.rows import add_rows, change_row, checkpoint_row
from tx_kit.servers import BASE_MODEL, config_for, wait_until

from tx.tinker.db_models import Checkpoint, ClientSession, Model, ModelStatus, SamplingSession, TxRequest
from tx.tinker.store.database import open_database, reading

logger = logging.getLogger(__name__)

KEYS = "tml-alice,tml-bob"
MAX_SECONDS = 10
N_WINDOWS = 3
MAX_GROWTH, MAX_GROWTH_PER_REQUEST = 1 << 20, 2 << 10
"""Permitted growth of the process in bytes, in total and per request, after it has seen all kinds of requests."""
MAX_BODY = 2_000_000
LIMITS = ("--max-body-bytes", str(MAX_BODY), "--hold-sec", "0.05", "--max-models", "100000")


@dataclass(frozen=True)
class Target:
    """A server with objects of the attacker and of another user."""

    server: ServerProcess
    surface: Surface
    valid: dict[str, Any]  # valid bodies by path
    names: list[str]  # ids of both users' objects
    expendable: list[str]  # ids of objects that may be ended
    database: Database


def add_checkpoint(server: ServerProcess, database: Database, owned: dict[str, str]) -> Path:
    folder = server.folder / owned["model"].replace(":", "_") / "weights" / "there"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"weights")
    add_rows(database, checkpoint_row(owned["model"], "there", base_model=BASE_MODEL, size_bytes=7))
    change_row(database, Model, owned["model"], status=ModelStatus.READY)
    return folder


def rows_of(database: Database, owned: dict[str, str]) -> str:
    with reading(database) as db:
        owner = db.get_one(ClientSession, owned["session"]).owner
        found = [
            *db.exec(select(ClientSession).where(ClientSession.owner == owner)),
            *db.exec(select(Model).where(Model.session_id == owned["session"])),
            *db.exec(select(SamplingSession).where(SamplingSession.session_id == owned["session"])),
            *db.exec(select(TxRequest).where(TxRequest.owner == owner)),
            *db.exec(select(Checkpoint).where(Checkpoint.model_id == owned["model"])),
        ]
        return "\n".join(sorted(row.model_dump_json() for row in found))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server for all tests; at the end, the other user's data must be as they were."""
    state = tmp_path_factory.mktemp("fuzz") / "state"
    with process(state, "--no-engine", *LIMITS, "--session-timeout-sec=-1", TX_API_KEYS=KEYS) as server:
        database = open_database(config_for(server.folder).database_url)
        alice, bob = (settle(server.client(**{"X-API-Key": f"tml-{user}"})) for user in ("alice", "bob"))
        folder = add_checkpoint(server, database, bob)
        add_checkpoint(server, database, alice)
        schema = httpx.get(f"{server.url}/openapi.json").json()
        before = rows_of(database, bob)
        assert before.count("\n") == 4
        names = [*alice.values(), *bob.values()]
        expendable = [*settle(server.client(**{"X-API-Key": "tml-alice"})).values(), *bob.values()]
        yield Target(server, Surface.of(schema), valid_bodies(alice), names, expendable, database)
        assert rows_of(database, bob) == before
        assert (folder / "file").read_bytes() == b"weights"
        database.dispose()


def send(server: ServerProcess, post: Post, *, sent: float = 1.0) -> tuple[int, bytes]:
    """Return the status and body of the reply; 0 if the request was broken off, or refused unread for its size."""
    head = [f"{post.method.upper()} ".encode() + post.path.encode("utf-8", "surrogatepass") + b" HTTP/1.1", b"Host: x"]
    headers = {"X-API-Key": "tml-alice", "Content-Length": str(len(post.body)), "Connection": "close", **post.headers}
    head += [f"{name}: {value}".encode() for name, value in headers.items()]
    whole = b"\r\n".join([*head, b"", b""]) + post.body
    with socket.create_connection(("127.0.0.1", server.port), timeout=MAX_SECONDS) as connection:
        try:
            connection.sendall(whole[: int(len(whole) * sent)])
            if sent < 1:
                return 0, b""
            reply = http.client.HTTPResponse(connection, method=post.method.upper())
            reply.begin()
            return reply.status, reply.read()
        except (BrokenPipeError, ConnectionResetError):
            if sent == 1 and len(post.body) <= MAX_BODY:
                raise
            return 0, b""


def wait_for_connections_to_close(server: ServerProcess) -> None:
    is_open = {psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT}

    def is_connected() -> bool:
        connections = server.process.net_connections("tcp")
        return any(one.laddr.port == server.port and one.status in is_open for one in connections)

    wait_until(lambda: not is_connected())


def fuzz(target: Target, n_examples: int) -> Counter[int]:
    """Send requests; return how often each status occurred."""
    seen: Counter[int] = Counter()

    @fuzzed(n_examples)
    @given(
        post=posts(target.surface, target.valid, target.names, target.expendable),
        sent=st.sampled_from([1.0] * 30 + [0.5, 0.9, 0.99]),
    )
    def run(post: Post, sent: float) -> None:
        started = time.monotonic()
        status, body = send(target.server, post, sent=sent)
        seconds = time.monotonic() - started
        seen[status] += 1
        assert seconds < MAX_SECONDS, post
        assert status < 500, (post, body)
        assert status != 409, post
        assert status < 400 or body or post.method == "head", post

    run()
    return seen


def test_no_request_breaks_the_server(target: Target) -> None:
    n = n_requests(450) // N_WINDOWS
    seen: Counter[int] = Counter()
    sizes, process = [], target.server.process
    for _ in range(N_WINDOWS):
        seen += fuzz(target, n)
        wait_for_connections_to_close(target.server)
        sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
    logger.info("%d requests: %s; %s", sum(seen.values()), dict(seen), sizes)
    assert {200, 400, 404, 422} <= set(seen)
    memory, n_files, n_threads = (after - before for before, after in zip(*sizes[-2:], strict=True))
    assert memory <= MAX_GROWTH + n * MAX_GROWTH_PER_REQUEST
    assert n_files <= 8  # connections of the database pool
    assert n_threads <= 6  # pools that were not full yet
    assert target.server.child.poll() is None
    assert "Traceback" not in target.server.log
