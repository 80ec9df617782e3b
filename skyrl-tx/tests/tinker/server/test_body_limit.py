"""Request bodies, without a network: an ASGI server passes on a few messages."""

from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tx.tinker.server.body_limit import BodyReader

MAX_BYTES = 1000
PACKED = zstandard.ZstdCompressor().compress(b"words" * 100)


class App:
    """Records the body and the message after it."""

    def __init__(self) -> None:
        self.body: bytes | None = None
        self.after: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message.get("more_body", False)
        self.body = message.get("body", b"")
        self.after = await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def post(
    parts: list[bytes], *, method: str = "POST", ends: bool = True, **headers: str
) -> tuple[int | None, App, str]:
    """Return the reply's status, what reached the application, and the reply's text."""
    messages: list[Any] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages.append({"type": "http.request"})
    messages.append({"type": "http.disconnect"})
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    app = App()
    raw_headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await BodyReader(app, MAX_BYTES)({"type": "http", "method": method, "headers": raw_headers}, receive, send)
    words = b"".join(message.get("body", b"") for message in sent).decode()
    return (sent[0]["status"] if sent else None), app, words


@given(st.lists(st.binary(max_size=100), max_size=9))
async def test_chunks_are_joined(parts: list[bytes]) -> None:
    status, app, _ = await post(parts)
    assert (status, app.body) == (200, b"".join(parts))
    assert app.after == {"type": "http.disconnect"}


async def test_a_truncated_body_is_dropped() -> None:
    status, app, _ = await post([b"{}"], ends=False)
    assert (status, app.body) == (None, None)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("headers", [{"content_length": "5"}, {"transfer_encoding": "chunked"}])
async def test_bodies_where_none_belongs(method: str, headers: dict[str, str]) -> None:
    status, app, words = await post([b"bytes"], method=method, **headers)
    assert (status, app.body) == (413, None)
    assert f"a {method} request takes no body; leave it out" in words


@pytest.mark.parametrize("encoding", ["zstd", "ZSTD"])
async def test_compressed_bodies(encoding: str) -> None:
    frames = PACKED + zstandard.ZstdCompressor().compress(b"more")
    _, app, _ = await post([frames[:7], frames[7:]], content_encoding=encoding)
    assert app.body == b"words" * 100 + b"more"
    _, app, _ = await post([PACKED], content_encoding="identity")
    assert app.body == PACKED


TOO_LARGE = "more than 1000 bytes; split the request"
BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 20))
assert len(BOMB) < MAX_BYTES / 2


@pytest.mark.parametrize(
    ("parts", "headers", "status", "words"),
    [
        ([], {"content_length": "1001"}, 413, TOO_LARGE),  # need not even be sent
        ([bytes(600), bytes(600)], {}, 413, TOO_LARGE),
        ([zstandard.ZstdCompressor().compress(bytes(1001))], {"content_encoding": "zstd"}, 413, TOO_LARGE),
        ([BOMB, BOMB], {"content_encoding": "zstd"}, 413, TOO_LARGE),
        ([b"no zstd"], {"content_encoding": "zstd"}, 400, "not valid zstd"),
        ([b"\x28\xb5\x2f\xfd\x00\xf8" + b"\x02\xff\xff\xff" * 9], {"content_encoding": "zstd"}, 400, "not valid zstd"),
        ([PACKED], {"content_encoding": "gzip"}, 415, "'gzip' is not supported"),
        ([b""], {"content_encoding": "br"}, 415, "'br' is not supported"),
    ],
)
async def test_refused_bodies(parts: list[bytes], headers: dict[str, str], status: int, words: str) -> None:
    found, app, text = await post(parts, **headers)
    assert (found, app.body, words in text) == (status, None, True)
