"""Messages over a socket, pickled in frames: 8 bytes of length, then a list of messages.

Messages queued at the same time share a frame. Unpickling can run arbitrary code, so open a channel only after the
other end has proven that it belongs to the same run.
"""

import asyncio
import pickle
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from skyrl_train.errors import EngineError

MAX_FRAME_BYTES = 1 << 30
CLOSE_TIMEOUT_S = 10.0

_HEADER = struct.Struct(">Q")

Message = tuple[int, str, Any]  # request number, kind, value


def new_local_address(name: str) -> tuple[str, str | None]:
    """Return a Unix socket address on this machine, and the folder to remove afterwards (None on Linux).

    On Linux, use the abstract namespace: the kernel cleans it up even if all processes are killed at once. Any user of
    the machine can connect there, so `serve` checks its token as on a TCP port.
    """
    if sys.platform == "linux":
        return f"\0skyrl-{name}-{secrets.token_hex(16)}", None
    folder = tempfile.mkdtemp(prefix=f"skyrl-{name}-")
    return f"{folder}/socket", folder


def listen(address: str) -> socket.socket:
    """Listen on "host:port" (port 0: any free port) or a Unix socket (a path, or "\\0" and a name)."""
    family, target = parse_address(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(target)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    """Return socket family and target of "host:port" or a Unix socket."""
    if address.startswith(("/", "\0")):
        return socket.AF_UNIX, address
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))


def encode(messages: list[Message]) -> bytes:
    """Encode messages as one frame. Raises EngineError if pickling fails or the frame is too large."""
    try:
        payload = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise EngineError(f"a message cannot be pickled: {error}") from error
    return _HEADER.pack(_check_size(len(payload))) + payload


def receive_blocking(sock: socket.socket) -> list[Message]:
    """Return the next frame's messages. Raises EOFError if the connection ends.

    The sender must not have sent another frame: buffering would lose its first bytes.
    """
    with sock.makefile("rb") as file:
        header = file.read(_HEADER.size)
        payload = file.read(_check_size(*_HEADER.unpack(header))) if len(header) == _HEADER.size else b""
    try:
        messages: list[Message] = pickle.loads(payload)
    except pickle.UnpicklingError as error:
        raise EOFError from error
    return messages


class Channel:
    """Messages over one connected socket, sent by a task. Belongs to the running event loop."""

    def __init__(self, sock: socket.socket, on_unsendable: Callable[[int, EngineError], None]) -> None:
        """Start sending over `sock`. `on_unsendable` gets the number of each unsendable message, and the error."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._on_unsendable = on_unsendable
        self._outbox: list[Message] = []
        self._wake = asyncio.Event()
        self._is_finishing = False
        self._writing = asyncio.create_task(self._write())

    def send(self, message: Message) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._wake.set()

    async def receive(self) -> list[Message] | None:
        """Return the messages of the next frame, or None if the connection ended. EngineError if it is too large."""
        await asyncio.sleep(0)  # let other tasks run even if the next frame has already arrived
        header = await receive_exactly(self._sock, _HEADER.size)
        payload = header and await receive_exactly(self._sock, _check_size(*_HEADER.unpack(header)))
        return pickle.loads(payload) if payload else None

    def finish(self) -> None:
        """Send the queued messages, then end this direction of the connection."""
        self._is_finishing = True
        self._wake.set()

    async def close(self) -> None:
        """Send the queued messages, wait briefly for the other end to read them, and close the socket."""
        self.finish()
        await asyncio.wait([self._writing], timeout=CLOSE_TIMEOUT_S)
        self._writing.cancel()
        await asyncio.wait([self._writing])
        self._sock.close()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the reading side reports a broken connection
            while self._outbox or not self._is_finishing:
                await self._wake.wait()
                self._wake.clear()
                messages, self._outbox = self._outbox, []
                for frame in self._frames(messages):
                    await loop.sock_sendall(self._sock, frame)
            self._sock.shutdown(socket.SHUT_WR)

    def _frames(self, messages: list[Message]) -> Iterator[bytes]:
        """Yield one frame, or several if one would be too large."""
        if not messages:
            return
        try:
            yield encode(messages)
        except EngineError as error:
            if len(messages) == 1:
                self._on_unsendable(messages[0][0], error)
                return
            half = len(messages) // 2
            yield from self._frames(messages[:half])
            yield from self._frames(messages[half:])


async def receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    """Return the next `size` bytes of a non-blocking socket, or None if the connection ends first."""
    loop = asyncio.get_running_loop()
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        try:
            n_bytes = await loop.sock_recv_into(sock, rest)
        except OSError:
            return None
        if n_bytes == 0:
            return None
        rest = rest[n_bytes:]
    return received


def _check_size(size: int) -> int:
    if size > MAX_FRAME_BYTES:
        raise EngineError(
            f"a message of {size:,} bytes exceeds the limit of {MAX_FRAME_BYTES:,}; send fewer requests in one call"
        )
    return size
