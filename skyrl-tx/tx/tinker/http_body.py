"""Bodies of requests, before any route sees them: read whole, unpacked, and never more than is allowed."""

from __future__ import annotations

import asyncio
import io

import zstandard
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tx.tinker.refusal import Refusal
from tx.tinker.replies import refusal_reply

LARGEST_WINDOW = 1 << 27
"""Of zstd, in bytes: memory that a small body can make us take."""
READ_SIZE = 1 << 20


class BodyLimit:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app = app
        self._most_bytes = most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            body = await self._read(headers, receive)
            if body is None:
                return
            if encoding := headers.get("content-encoding"):
                body = await asyncio.to_thread(self._unpack, body, encoding)
        except Refusal as refusal:
            await refusal_reply(refusal)(scope, receive, send)
            return
        await self._app(scope, _Replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """All of it; None if the client left before: a part of a message may look like a whole one."""
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told) > self._most_bytes:
            self._refuse_size()
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._most_bytes:
                self._refuse_size()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _unpack(self, body: bytes, encoding: str) -> bytes:
        if encoding.lower() == "identity":
            return body
        if encoding.lower() != "zstd":
            raise Refusal(415, f"Content-Encoding {encoding[:50]!r} is not supported; use zstd or none")
        unpacked = bytearray()
        decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        try:
            with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
                while part := reader.read(READ_SIZE):
                    unpacked += part
                    if len(unpacked) > self._most_bytes:
                        self._refuse_size()
        except zstandard.ZstdError as error:
            raise Refusal(400, f"the body is no zstd, as its Content-Encoding says: {error}") from error
        return bytes(unpacked)

    def _refuse_size(self) -> None:
        raise Refusal(413, f"the body is more than {self._most_bytes} bytes; send less at once")


class _Replay:
    """The body in one piece, and then whatever else comes, which is that the client has gone."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
