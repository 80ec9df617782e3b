"""Control connections of a weight sync: receivers connect to the sender, and both ends exchange lines of JSON.

If an end closes its connection, fails or is silent for too long, the sync fails at once, and the error says which end.
"""

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync.base import SyncPlan

HELLO, MESSAGE, FAILED = "hello", "message", "failed"
MIN_POLL_S, MAX_POLL_S = 0.002, 0.1
CALL_OFF_TIMEOUT_S = 2.0
GRACE_S = 5.0  # receivers wait this much longer than the sender, because the sender can name the silent end
LINGER_S = 10.0  # a failed sender still informs receivers that connect within this time
READ_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection between the sender and a receiver, or the driver."""

    sock: socket.socket
    rank: int | None = None  # of the receiver, None until it has sent it
    messages: deque[Any] = field(default_factory=deque)
    is_open: bool = True
    _rest: bytes = b""  # an incomplete line

    def send(self, kind: str, value: Any) -> None:
        """Send a line. If the connection is closed, the next read reports that."""
        with suppress(OSError):
            self.sock.sendall(_encode(kind, value))

    def read(self) -> list[bytes]:
        """Return the lines that have arrived, after waiting for data within the socket's timeout."""
        try:
            data = self.sock.recv(READ_BYTES)
        except (TimeoutError, BlockingIOError):
            return []
        except OSError:
            data = b""
        self.is_open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


class SenderEndpoint:
    """The sender's connections to all receivers."""

    def __init__(self, plan: SyncPlan) -> None:
        """Listen at the plan's address."""
        self._plan = plan
        self._receivers = range(1, plan.n_receivers + 1)
        host, port = _parse(plan.address)
        try:
            self._listener = socket.create_server((host, port))
        except OSError as error:
            raise SyncError(f"weight sync {plan.version}: cannot listen at {plan.address}: {error}") from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connections: list[_Connection] = []
        self._failed: set[int] = set()  # ranks of receivers that reported a failure

    def gather(self, stage: str, deadline: float | None = None) -> dict[int, Any]:
        """Return the next message of every receiver, by rank. `stage` completes "did not …" in error messages.

        Raise SyncError if an end has failed, or a receiver has sent nothing until `deadline`, a value of
        `time.monotonic()`. Defaults to the plan's timeout from now.
        """
        deadline = deadline or time.monotonic() + self._plan.timeout_s
        while missing := [rank for rank in self._receivers if not self._messages(rank)]:
            for rank in missing:
                if any(c.rank == rank and not c.is_open for c in self._connections):
                    raise SyncError(
                        f"weight sync {self._plan.version}: {self._plan.name(rank)} ended before it could {stage}; see "
                        "its own messages"
                    )
            if (left_s := deadline - time.monotonic()) <= 0:
                names = ", ".join(map(self._plan.name, missing))
                raise SyncError(_describe_silence(self._plan, names, stage))
            self._receive(left_s)
        return {rank: self._messages(rank).popleft() for rank in self._receivers}

    def send(self, message: Any) -> None:
        """Send a message to every receiver that has connected."""
        for connection in self._connections:
            if connection.rank is not None:
                connection.send(MESSAGE, message)

    def fail(self, error: BaseException) -> None:
        """Inform all receivers that the sync has failed, even if they connect only within the next `LINGER_S`."""
        informed: set[int | None] = {None, *self._failed}
        deadline = time.monotonic() + LINGER_S
        while len(informed) <= len(self._receivers) and time.monotonic() < deadline:
            for connection in self._connections:
                if connection.rank not in informed:
                    informed.add(connection.rank)
                    connection.send(FAILED, str(error))
            if len(informed) <= len(self._receivers):
                with suppress(SyncError):
                    self._receive(MAX_POLL_S)

    def close(self) -> None:
        """Close all connections."""
        self._selector.close()
        for connection in self._connections:
            connection.sock.close()
        self._listener.close()

    def _messages(self, rank: int) -> deque[Any]:
        return next((c.messages for c in self._connections if c.rank == rank), deque())

    def _receive(self, timeout_s: float) -> None:
        """Wait for data or a connection, at most `timeout_s`, and split data into messages."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                connection = _Connection(self._listener.accept()[0])
                self._connections.append(connection)
                self._selector.register(connection.sock, selectors.EVENT_READ, connection)
                continue
            connection = key.data
            lines = connection.read()
            if not connection.is_open:
                self._selector.unregister(connection.sock)
            for line in lines:
                try:
                    kind, value = json.loads(line)
                except (ValueError, TypeError):  # not one of our receivers, e.g. a port scan
                    continue
                if kind == FAILED:
                    reason, ranks = value
                    self._failed.update(ranks)
                    raise SyncError(f"weight sync {self._plan.version} was called off: {reason}")
                if kind == HELLO:
                    connection.rank = value
                else:
                    connection.messages.append(value)


class ReceiverEndpoint:
    """A receiver's connection to the sender."""

    def __init__(self, plan: SyncPlan) -> None:
        """Connect to the sender. Retry until it listens."""
        self._plan = plan
        self._connection = _Connection(_connect(plan, plan.timeout_s), plan.rank)
        self.send(plan.rank, HELLO)

    def send(self, message: Any, kind: str = MESSAGE) -> None:
        """Send a message to the sender."""
        self._connection.sock.settimeout(self._plan.timeout_s)
        self._connection.send(kind, message)

    def receive(self, stage: str) -> Any:
        """Return the sender's next message, or raise SyncError. `stage` is as in `SenderEndpoint.gather`."""
        deadline = time.monotonic() + self._plan.timeout_s + GRACE_S
        while not self._connection.messages:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise SyncError(_describe_silence(self._plan, self._plan.name(0), stage))
            self.check(stage, left_s)
        return self._connection.messages.popleft()

    def check(self, stage: str, timeout_s: float = 0) -> None:
        """Wait up to `timeout_s` for data and split it into messages.

        Raise SyncError if the sender has failed or ended. `stage` completes "ended before it could …".
        """
        self._connection.sock.settimeout(timeout_s)
        for line in self._connection.read():
            kind, value = json.loads(line)
            if kind == FAILED:
                raise SyncError(f"weight sync {self._plan.version} was called off: {value}")
            self._connection.messages.append(value)
        if not self._connection.is_open:
            raise SyncError(
                f"weight sync {self._plan.version} broke off: {self._plan.name(0)} ended before it could {stage}"
            )

    def fail(self, error: BaseException) -> None:
        """Inform the sender, and through it all other receivers, that this receiver has failed."""
        self.send([str(error), [self._plan.rank]], FAILED)

    def close(self) -> None:
        """Close the connection."""
        self._connection.sock.close()


def call_off(plan: SyncPlan, reason: BaseException, failed: Sequence[int] = ()) -> bool:
    """Inform the sender that an end failed, perhaps before it connected, and which receivers have `failed`.

    Return False if the sender is not listening.
    """
    try:
        with _connect(plan, CALL_OFF_TIMEOUT_S) as sock:
            sock.sendall(_encode(FAILED, [str(reason), list(failed)]))
    except (OSError, SyncError):
        return False
    return True


@contextmanager
def group_errors(plan: SyncPlan, others: Collection[int]) -> Iterator[None]:
    """Turn errors of a process group into a SyncError that names the other ends."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        names = ", ".join(map(plan.name, others))
        reason = str(error).strip().splitlines()[0]
        raise SyncError(f"weight sync {plan.version} broke off between {names} and this process: {reason}") from error


def open_store(plan: SyncPlan, port: int = 0) -> dist.TCPStore:
    """Return the store through which a process group connects. The sender creates it on a free port."""
    host, _ = _parse(plan.address)
    timeout = timedelta(seconds=plan.timeout_s)
    return dist.TCPStore(host, port, is_master=plan.rank == 0, timeout=timeout, wait_for_workers=False)


def _connect(plan: SyncPlan, timeout_s: float) -> socket.socket:
    deadline, poll_s = time.monotonic() + timeout_s, MIN_POLL_S
    while True:
        try:
            sock = socket.create_connection(_parse(plan.address), timeout_s)
            if sock.getsockname() != sock.getpeername():  # TCP can connect a local port to itself
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return sock
            sock.close()
        except OSError:
            pass
        if time.monotonic() > deadline:
            raise SyncError(_describe_silence(plan, plan.name(0), f"listen at {plan.address}"))
        time.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def _encode(kind: str, value: Any) -> bytes:
    return json.dumps([kind, value]).encode() + b"\n"


def _describe_silence(plan: SyncPlan, names: str, stage: str) -> str:
    return (
        f"weight sync {plan.version}: {names} did not {stage} within {plan.timeout_s:g} s; see its own messages, or "
        "raise generator.weight_sync_timeout_seconds"
    )
