"""A socket on which server and engine wake each other: a byte means "look at the database".

It only saves time. Without it, e.g. if the engine is started separately, both poll every `POLL_SEC`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import time
from collections.abc import Callable
from typing import Self

UNUSABLE = 78  # EX_CONFIG of sysexits.h
"""Exit status of an engine that cannot serve with its settings. Its last message has the reason."""
POLL_SEC = 0.05
N_READ = 4096


class Doorbell:
    """One end of the socket. Any thread may ring. Only one may wait or listen."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._socket = sock
        self.is_hung_up = False
        """True once `wait` has noticed that the other process ended. An engine exits with its server."""
        if sock is not None:
            sock.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Doorbell, Doorbell]:
        """Create both ends. One end's `fileno` goes to the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int | None) -> Doorbell:
        """Open the end that the parent process passed, if any."""
        return cls(None if fd is None else socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Return the socket's file descriptor. Raise ValueError if there is no socket."""
        if self._socket is None:
            raise ValueError("this doorbell has no socket")
        return self._socket.fileno()

    def ring(self) -> None:
        """Wake the other process without blocking. Do nothing if the buffer is full or the process is gone."""
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                self._socket.send(b"\0", getattr(socket, "MSG_NOSIGNAL", 0))

    def wait(self, timeout: float) -> bool:
        """Wait for a ring or the timeout. Return True if the database should be read: always without a socket."""
        if self._socket is None or self.is_hung_up:
            time.sleep(min(timeout, POLL_SEC))
            return True
        poll = select.poll()  # `select.select` rejects large file descriptors
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(math.ceil(timeout * 1000))) and self._answer()

    def _answer(self) -> bool:
        """Consume pending rings. Return True if there were any."""
        assert self._socket is not None
        try:
            rings = self._socket.recv(N_READ)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            rings = b""
        self.is_hung_up = not rings
        return True

    def listen(self, on_ring: Callable[[], None]) -> None:
        """Call `on_ring` for each ring, in the running event loop, until either end is closed."""
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._on_readable, on_ring)

    def stop_listening(self) -> None:
        """Remove the listener. Call this before the event loop ends."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)

    def _on_readable(self, on_ring: Callable[[], None]) -> None:
        if self._answer():
            on_ring()
        if self.is_hung_up:
            self.stop_listening()

    def close(self) -> None:
        """Close this end."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
