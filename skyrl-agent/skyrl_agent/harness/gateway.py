"""A proxy to one session of the endpoint, with a limited number of turns. Isolated agents reach no other address."""

from __future__ import annotations

import asyncio
import os
import re
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

MAX_HEAD_BYTES = 64 << 10
CHUNK_BYTES = 64 << 10
MAX_CONNECTIONS = 64  # each takes two file descriptors of the trainer
REQUEST = re.compile(rb"[A-Z]+ (/v1(?:/[\w.:-]+)+)(?:\?[^ \r\n]*)? HTTP/1\.[01]\r\n")
"""A request line with a path that has one spelling. `%6d`, `//` and `..` could hide a turn or another session."""
BARE_NEWLINE = re.compile(rb"(?<!\r)\n|\r(?!\n)")  # the server may end a head there and read a second request
TURN = re.compile(rb"/(chat/completions|completions|responses|messages)$")
MAX_RETRIES = 5
"""Retries per turn that are not turns themselves. Clients of OpenAI and Anthropic send up to 2 by default."""
RETRY = re.compile(rb"\r\nx-stainless-retry-count: *[1-9]", re.IGNORECASE)
CONNECTION = re.compile(rb"\r\nconnection:[^\r]*", re.IGNORECASE)
REFUSAL = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"


class Gateway:
    """A proxy that maps `/v1/…` to a session's URL, on a Unix socket or on a port of 127.0.0.1.

    It forwards bytes and parses only the head of a request: one request per connection.
    """

    def __init__(self, base_url: str, max_turns: int, path: Path | None) -> None:
        """Prepare the gateway of the session at `base_url`. `path` is the Unix socket; None picks a port."""
        upstream = urlsplit(base_url)
        self._address = upstream.hostname or "", upstream.port or 80
        self._prefix = upstream.path.rstrip("/").removesuffix("/v1").encode()
        self._path, self._max_turns = path, max_turns
        self._open: set[asyncio.Task[None]] = set()
        self.origin = ""
        self.n_turns = 0  # requests to the model, without retries
        self._n_retries = 0
        self.turn_limit = asyncio.Event()
        """Set by the first request beyond `max_turns`."""

    async def __aenter__(self) -> Self:
        if self._path is not None:
            folder = os.open(self._path.parent, os.O_PATH | os.O_CLOEXEC)
            try:  # by its descriptor, because the address of a socket has at most 107 bytes
                name = f"/proc/self/fd/{folder}/{self._path.name}"
                self._server = await asyncio.start_unix_server(self._accept, name, limit=MAX_HEAD_BYTES)
            finally:
                os.close(folder)
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
            self.origin = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._open.add(task)
        try:
            # A client that disconnects, or a server that is gone, ends its connection and nothing else.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            await _refuse(writer, b"431 Request Header Fields Too Large", b"the header is too long")
            return
        request = REQUEST.match(head)
        if request is None or b"/.." in request[1] or BARE_NEWLINE.search(head):
            await _refuse(writer, b"404 Not Found", b"there are only plain paths below /v1/")
            return
        method, _, rest = head.partition(b" ")
        is_turn = method == b"POST" and TURN.search(request[1]) is not None
        if is_turn and RETRY.search(head) and self._n_retries < MAX_RETRIES * self.n_turns:
            self._n_retries += 1  # an agent that marks every request as a retry runs out of them
        elif is_turn:
            if self.n_turns >= self._max_turns:
                self.turn_limit.set()
                await _refuse(writer, b"400 Bad Request", b"the turn limit is reached")
                return
            self.n_turns += 1
        upstream, sink = await asyncio.open_connection(*self._address)
        try:
            rest = CONNECTION.sub(b"", rest)[:-2]
            sink.write(method + b" " + self._prefix + rest + b"Connection: close\r\n\r\n")
            sending = asyncio.create_task(_copy(reader, sink))
            receiving = asyncio.create_task(_copy(upstream, writer))
            try:
                await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, receiving):
                    task.cancel()
                await asyncio.gather(sending, receiving, return_exceptions=True)
        finally:
            sink.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(CHUNK_BYTES):
        target.write(chunk)
        await target.drain()


async def _refuse(writer: asyncio.StreamWriter, status: bytes, reason: bytes) -> None:
    body = b'{"error": {"message": "%s", "type": "invalid_request_error"}}' % reason
    writer.write(REFUSAL % (status, len(body), body))
    await writer.drain()
