"""How the server and the engine wake each other: a byte for "look into the database", in both directions.

The bell only saves time. Without one (an engine that was started by itself), each looks every `POLL_SEC`.
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
"""The exit status of an engine that cannot serve what it was told to; what it said last says why."""
POLL_SEC = 0.05
N_READ = 4096


class Doorbell:
    """One end of it, of one process. Threads may ring at once; one of them waits or listens."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self._socket = sock
        self._is_hung_up = False
        if sock is not None:
            sock.setblocking(False)

    @classmethod
    def pair(cls) -> tuple[Doorbell, Doorbell]:
        """Both ends; `fileno` of one goes to the other process."""
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    def inherited(cls, fd: int | None) -> Doorbell:
        """The end that the process which started this one left open, or none."""
        return cls(None if fd is None else socket.socket(fileno=fd))

    @property
    def is_hung_up(self) -> bool:
        """Whether the other process has ended, as far as `wait` has seen. An engine should end with its server."""
        return self._is_hung_up

    def fileno(self) -> int:
        """Of the socket; ValueError without one."""
        if self._socket is None:
            raise ValueError("this doorbell has no socket")
        return self._socket.fileno()

    def ring(self) -> None:
        """Wake the other; never waits. A full line holds enough rings, and a dead one needs none."""
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                self._socket.send(b"\0", getattr(socket, "MSG_NOSIGNAL", 0))

    def wait(self, timeout: float) -> bool:
        """Until a ring, or for so many seconds; whether it is worth looking. Without a bell, that is always so."""
        if self._socket is None or self._is_hung_up:
            time.sleep(min(timeout, POLL_SEC))
            return True
        poll = select.poll()  # `select.select` refuses large numbers
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(math.ceil(timeout * 1000))) and self._answer()

    def _answer(self) -> bool:
        """Take the rings so far; whether there were any."""
        assert self._socket is not None
        try:
            rings = self._socket.recv(N_READ)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            rings = b""
        self._is_hung_up = not rings
        return True

    def listen(self, on_ring: Callable[[], None]) -> None:
        """Call this for rings, in the running event loop, until the other end or this one is closed."""
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(self._socket, self._heard, on_ring)

    def stop_listening(self) -> None:
        """Before the event loop ends."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)

    def _heard(self, on_ring: Callable[[], None]) -> None:
        if self._answer():
            on_ring()
        if self._is_hung_up:
            self.stop_listening()

    def close(self) -> None:
        """This end."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
