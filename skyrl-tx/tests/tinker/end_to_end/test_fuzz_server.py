"""No request breaks the server, which runs in a separate process.

Nothing causes a server error, a hang or memory growth, and other users' data stay as they were.
"""

from __future__ import annotations

import errno
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
from tx_kit.fuzz import Post, Surface, fuzzed, n_requests, posts
from tx_kit.processes import ServerProcess, process
from tx_kit.rows import add_rows, change_row, checkpoint_row
from tx_kit.servers import BASE_MODEL, config_for, new_model, new_sampler, new_session, wait_until

from tx.tinker.db_models import (
    Checkpoint,
    Kind,
    Model,
    ModelStatus,
    Request,
    RequestStatus,
    SamplingSession,
    Session,
)
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


def settle(server: ServerProcess, user: str) -> dict[str, str]:
    """Create a session with a model, a sampler and a request."""
    with server.client(**{"X-API-Key": f"tml-{user}"}) as http:
        session_id = new_session(http)
        request_id = new_model(http, session_id).json()["request_id"]
        sampler_id = new_sampler(http, session_id)
    ids = {"session": session_id, "model": f"{session_id}:train:0", "request": request_id, "sampler": sampler_id}
    return {**ids, "path": f"tinker://{ids['model']}/weights/there"}


def add_checkpoint(server: ServerProcess, database: Database, owned: dict[str, str]) -> Path:
    folder = server.folder / owned["model"].replace(":", "_") / "weights" / "there"
    folder.mkdir(parents=True)
    (folder / "file").write_bytes(b"weights")
    add_rows(database, checkpoint_row(owned["model"], "there", base_model=BASE_MODEL, size_bytes=7))
    change_row(database, Model, owned["model"], status=ModelStatus.READY)
    return folder


def valid_bodies(mine: dict[str, str]) -> dict[str, Any]:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3]}]},
        "loss_fn_inputs": {"target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}},
    }
    sampling = {"max_tokens": 1, "seed": 1, "stop": [2], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    session, model = {"session_id": mine["session"]}, {"model_id": mine["model"]}
    bodies = {
        "create_session": {"tags": ["a"], "user_metadata": {"a": {"b": [1]}}, "display_name": "x"},
        "session_heartbeat": session,
        "sessions/search": {"session_id": mine["session"], "statuses": [{"type": "active"}], "limit": 5},
        "create_model": {**session, "model_seq_id": 1, "base_model": BASE_MODEL, "lora_config": {"rank": 4, "seed": 1}},
        "get_info": model,
        "optim_step": {**model, "seq_id": 7, "adam_params": {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-9}},
        "forward_backward": {**model, "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"}},
        "save_weights": {**model, "path": "new", "ttl_seconds": 3600, "user_metadata": {"a": "b"}},
        "save_weights_for_sampler": {**model, "sampling_session_seq_id": 3},
        "load_weights": {**session, "model_seq_id": 2, "path": mine["path"], "optimizer": True},
        "create_sampling_session": {**session, "sampling_session_seq_id": 1, "base_model": BASE_MODEL},
        "asample": {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": sampling,
            "sampling_session_id": mine["sampler"],
            "seq_id": 1,
            "num_samples": 2,
            "prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        },
        "retrieve_future": {"request_id": mine["request"], "allow_metadata_only": True},
        "cancel_future": {"request_id": mine["request"]},
        "weights_info": {"tinker_path": mine["path"]},
        "copy_weights": {"source_path": mine["path"], "destination_project_id": "p", "ttl_seconds": 3600},
    }
    return {f"/api/v1/{path}": body for path, body in bodies.items()}


def rows_of(database: Database, owned: dict[str, str]) -> str:
    """Return all rows of a user as text."""
    with reading(database) as db:
        owner = db.get_one(Session, owned["session"]).owner
        found = [
            *db.exec(select(Session).where(Session.owner == owner)),
            *db.exec(select(Model).where(Model.session_id == owned["session"])),
            *db.exec(select(SamplingSession).where(SamplingSession.session_id == owned["session"])),
            *db.exec(select(Request).where(Request.owner == owner)),
            *db.exec(select(Checkpoint).where(Checkpoint.model_id == owned["model"])),
        ]
        return "\n".join(sorted(row.model_dump_json() for row in found))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A server for all tests; at the end, the other user's data must be as they were."""
    state = tmp_path_factory.mktemp("fuzz") / "state"
    with process(state, "--no-engine", *LIMITS, "--session-timeout-sec=-1", TX_API_KEYS=KEYS) as server:
        database = open_database(config_for(server.folder).database_url)
        alice, bob = settle(server, "alice"), settle(server, "bob")
        folder = add_checkpoint(server, database, bob)
        add_checkpoint(server, database, alice)
        schema = httpx.get(f"{server.url}/openapi.json").json()
        before = rows_of(database, bob)
        assert before.count("\n") == 4
        names = [*alice.values(), *bob.values()]
        expendable = [*settle(server, "alice").values(), *bob.values()]
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


@dataclass(frozen=True)
class Size:
    """Resources of a process."""

    memory: int
    n_files: int
    n_threads: int


def size_of(server: ServerProcess) -> Size:
    child = server.process

    def is_connected() -> bool:
        is_open = {psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT}
        return any(c.laddr.port == server.port and c.status in is_open for c in child.net_connections("tcp"))

    wait_until(lambda: not is_connected())
    return Size(child.memory_info().rss, child.num_fds(), child.num_threads())


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
    sizes = []
    for _ in range(N_WINDOWS):
        seen += fuzz(target, n)
        sizes.append(size_of(target.server))
    logger.info("%d requests: %s; %s", sum(seen.values()), dict(seen), sizes)
    before, after = sizes[-2:]
    assert {200, 400, 404, 422} <= set(seen)
    assert after.n_threads <= before.n_threads + 6  # pools that were not full yet
    assert after.n_files <= before.n_files + 8  # connections of the database pool
    assert after.memory <= before.memory + MAX_GROWTH + n * MAX_GROWTH_PER_REQUEST
    assert target.server.child.poll() is None
    assert "Traceback" not in target.server.log
    _end(target)


def _end(target: Target) -> None:
    """End the session, which removes what was accepted."""
    alice = target.valid["/api/v1/session_heartbeat"]["session_id"]
    with target.server.client(**{"X-API-Key": "tml-alice"}) as http:
        assert http.post(f"sessions/{alice}/finish", json={"reason": {"type": "success"}}).is_success
    lasting = (Kind.SAVE_WEIGHTS, Kind.SAVE_WEIGHTS_EXTERNAL, Kind.SAVE_WEIGHTS_FOR_SAMPLER, Kind.UNLOAD_MODEL)
    with reading(target.database) as db:
        left = db.exec(
            select(Request).where(Request.session_id == alice, Request.status == RequestStatus.PENDING)
        ).all()
        last_save = max((one.request_id or 0 for one in left if one.kind in lasting[:3]), default=0)
        assert all(one.kind in lasting or (one.request_id or 0) < last_save for one in left)
        assert all(
            model.status is ModelStatus.UNLOADING for model in db.exec(select(Model)) if model.session_id == alice
        )


RAW = [
    b"\r\n\r\n",
    b"\0" * 1000,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET http://elsewhere/ HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000,
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Key: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]


@pytest.mark.parametrize("sent", RAW, ids=range(len(RAW)))
def test_invalid_http(target: Target, sent: bytes) -> None:
    server, reply = target.server, b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=MAX_SECONDS) as connection:
        try:
            connection.sendall(sent.replace(b"Host: x\r\n", b"Host: x\r\nX-API-Key: tml-alice\r\n"))
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                reply += part
        except OSError as error:
            if error.errno not in (errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE):  # refused before the body was read
                raise
    assert not reply.startswith(b"HTTP/1.1 5"), reply
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}


def test_silent_connections(target: Target) -> None:
    server = target.server
    before = server.process.num_fds()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for connection in idle[::2]:
        connection.sendall(b"POST /api/v1/create_session HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    started = time.monotonic()
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
    assert time.monotonic() - started < MAX_SECONDS
    for connection in idle:
        connection.close()
    wait_until(lambda: server.process.num_fds() <= before + 5)
