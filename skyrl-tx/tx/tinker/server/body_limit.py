"""Read and decompress request bodies before the routes see them, up to a maximum size."""

import asyncio
import io

import zstandard
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tx.tinker.refusal import RefusalError
from tx.tinker.server.replies import refusal_reply

MAX_WINDOW = 1 << 27
"""Maximum zstd window in bytes. A small body could otherwise make the server allocate much more."""
READ_SIZE = 1 << 20
BODILESS_METHODS = ("GET", "HEAD")


def has_body(headers: Headers) -> bool:
    """Return True if the headers announce a body. HTTP/1.1 requires it of every request with a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


class BodyReader:
    """ASGI middleware that buffers, decompresses and limits request bodies."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["method"] in BODILESS_METHODS and not has_body(headers):
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] in BODILESS_METHODS:
                raise RefusalError(
                    413, f"a {scope['method']} request takes no body; leave it out, or use another method"
                )
            body = await self._read(headers, receive)
            if body is None:
                return
            if encoding := headers.get("content-encoding"):
                body = await asyncio.to_thread(self._unpack, body, encoding)
        except RefusalError as refusal:
            await refusal_reply(refusal)(scope, receive, send)
            return
        unread = [body]

        async def replay() -> Message:
            """Replay the body as one message, then forward the disconnect."""
            if not unread:
                return await receive()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Read the whole body. Return None if the client disconnects, since a partial message may look complete."""
        content_length = headers.get("content-length", "")
        if content_length.isdecimal() and int(content_length) > self._max_bytes:
            self._refuse_size()
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > self._max_bytes:
                self._refuse_size()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _unpack(self, body: bytes, encoding: str) -> bytes:
        if encoding.lower() == "identity":
            return body
        if encoding.lower() != "zstd":
            raise RefusalError(415, f"Content-Encoding {encoding[:50]!r} is not supported; use zstd or none")
        unpacked = bytearray()
        decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)
        try:
            with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
                while part := reader.read(READ_SIZE):
                    unpacked += part
                    if len(unpacked) > self._max_bytes:
                        self._refuse_size()
        except zstandard.ZstdError as error:
            raise RefusalError(400, f"the body is not valid zstd, contrary to its Content-Encoding: {error}") from error
        return bytes(unpacked)

    def _refuse_size(self) -> None:
        raise RefusalError(413, f"the body is more than {self._max_bytes} bytes; split the request")
