"""An HTTP server on the loopback interface. Each site has an address that only its own episode knows."""

import asyncio
from contextlib import suppress
from secrets import token_hex
from urllib.parse import parse_qsl, urlsplit

from skyrl_gym.envs.browser.sites.base import Redirect, Site

MAX_BODY_BYTES = 1 << 20
REASONS = {200: "OK", 303: "See Other", 400: "Bad Request", 404: "Not Found"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'"
"""Pages run no scripts and load nothing."""


class SiteServer:
    """The server of all sites of a process. Everything runs in the event loop of `start`."""

    def __init__(self) -> None:
        self._sites: dict[str, Site] = {}  # by the first part of their path
        self._connections: set[asyncio.Task[None]] = set()
        self.host = ""
        """Host and port."""

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.host = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def add(self, site: Site) -> str:
        """Serve a site. Return the address of its start page."""
        token = token_hex(16)
        self._sites[token] = site
        return f"http://{self.host}/{token}/"

    def remove(self, site: Site) -> None:
        """Stop serving a site."""
        self._sites = {token: other for token, other in self._sites.items() if other is not site}

    async def close(self) -> None:
        """Stop listening and end all connections."""
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request. A browser also opens connections that it never uses."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                writer.write(await self._answer(reader))
                await writer.drain()
        except asyncio.CancelledError:  # by `close`; asyncio's streams would report it
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, rest = first.partition(" ")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            return _respond(400)
        body = (await reader.readexactly(int(length))).decode("utf-8", "replace")
        url = urlsplit(rest.rpartition(" ")[0])
        token, _, path = url.path.removeprefix("/").partition("/")
        site = self._sites.get(token)
        if site is None or headers.get("host") != self.host or method not in ("GET", "POST"):
            return _respond(404)
        answer = (
            site.post(path, dict(parse_qsl(body, keep_blank_values=True)))
            if method == "POST"
            else site.get(path, dict(parse_qsl(url.query, keep_blank_values=True)))
        )
        if answer is None:
            return _respond(404)
        if isinstance(answer, Redirect):
            return _respond(303, f"Location: {answer.path}\r\n")
        return _respond(200, body=answer)


def _respond(status: int, header: str = "", body: str = "") -> bytes:
    content = (body or REASONS[status]).encode()
    return (
        f"HTTP/1.1 {status} {REASONS[status]}\r\n{header}Content-Type: text/html; charset=utf-8\r\n"
        f"Content-Security-Policy: {POLICY}\r\nCache-Control: no-store\r\nContent-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode("latin-1") + content
