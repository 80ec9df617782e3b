"""A read-only HTTP server for the pages of one run.

On a loopback interface, everyone on this machine may read, and a request is refused if its Host header is not a
loopback name. Otherwise, a web page could read the run through the visitor's browser (DNS rebinding). On other
interfaces, requests need the token of the printed address instead.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from skyrl_report.browser import FOLDER, INDEX, encode_chunk, encode_index, last_step, read_index, render_browser
from skyrl_report.errors import DataError
from skyrl_report.metrics_file import read_metrics
from skyrl_report.page import render_report
from skyrl_report.run_folder import IMAGE_FOLDER, IMAGE_NAME, RunFolder
from skyrl_report.status import read_status
from skyrl_report.watch.mirror import Mirror

logger = logging.getLogger(__name__)

MIRROR_S = 10.0
"""Seconds between two looks at remote storage."""

FAST_S = 0.5
"""Maximum time of a page that may be rendered for every request."""

INDEX_S = 1.0
"""Seconds in which an answer extends the index. The page asks again until the index is complete."""

VERSION = "X-Run-Version"
"""Header with the version of the files from which a page was rendered."""

COOKIE = "skyrl_token"
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
)
POLICY += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
IMAGE_PATH = re.compile(rf"/(evals|trajectories)/{IMAGE_FOLDER}/({IMAGE_NAME.pattern})")
CHUNK_PATH = re.compile(rf"/{FOLDER}/([0-9a-f]{{12}})-([0-9]{{1,9}})\.js")
SCRIPT = "text/javascript; charset=utf-8"
IMAGE_TYPES = {"png": "image/png", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}


@dataclass(frozen=True)
class Answer:
    """The content of an address."""

    content: bytes
    media_type: str = "text/html; charset=utf-8"
    version: str = ""  # of the run's files


@dataclass(frozen=True)
class _Rendered:
    """A page, and the earliest time at which it may be rendered again."""

    page: Answer
    due_at: float


class Site:
    """The pages of a run by address.

    A page is rendered again only if the run's files have changed. A page that took long is also served for ten times as
    long, so that watching a long run takes a tenth of a core at most.
    """

    def __init__(self, folder: RunFolder, mirror: Mirror | None = None) -> None:
        self._folder = folder
        self._mirror = mirror
        self._mirrored_at = time.monotonic()
        self._lock = threading.Lock()
        self._index_lock = threading.Lock()
        self._index = read_index(folder)
        self._pages: dict[str, _Rendered] = {}

    def find(self, address: str) -> Answer | None:
        """Return the content of an address, or None if there is none."""
        if match := IMAGE_PATH.fullmatch(address):
            return self._image(self._folder.path / match[1] / IMAGE_FOLDER / match[2])
        if address == f"/{FOLDER}/{INDEX}":
            return self._index_script()
        if match := CHUNK_PATH.fullmatch(address):
            return self._chunk_script(match[1], int(match[2]))
        pages: dict[str, Callable[[], Answer]] = {
            "/report.html": self._report,
            "/trajectories.html": self._browser,
            "/state.json": self._state,
        }
        if address not in pages:
            return None
        with self._lock:  # concurrent requests for a changed page render it once
            self._update_mirror()
            started, version, known = time.monotonic(), self.version(), self._pages.get(address)
            if known is None or (known.page.version != version and started >= known.due_at):
                page = replace(pages[address](), version=version)
                ended = time.monotonic()
                pause_s = 10 * (ended - started) if ended - started > FAST_S else 0.0
                known = self._pages[address] = _Rendered(page, ended + pause_s)
            return known.page

    def version(self) -> str:
        """Return a text that changes when a file of the run does."""
        folder = self._folder
        files = [folder.metrics, folder.session, folder.config_yaml, folder.changes, folder.train_log]
        files += [*folder.path.glob("evals/*"), folder.path / "trajectories"]  # a new file changes its folder
        stats = [(str(path), (found := path.stat()).st_mtime_ns, found.st_size) for path in files if path.exists()]
        return blake2b(repr(stats).encode(), digest_size=8).hexdigest()

    def _update_mirror(self) -> None:
        if self._mirror is not None and time.monotonic() >= self._mirrored_at + MIRROR_S:
            self._mirror.update()
            self._mirrored_at = time.monotonic()

    def _report(self) -> Answer:
        return Answer(render_report(self._folder, is_live=True).encode())

    def _state(self) -> Answer:
        status = read_status(self._folder, read_metrics(self._folder.metrics))
        state = {"version": self.version(), "progress": status.progress}
        return Answer(json.dumps(state).encode(), "application/json")

    def _browser(self) -> Answer:
        return Answer(render_browser(self._folder, is_live=True).encode())

    def _index_script(self) -> Answer:
        with self._index_lock:
            is_complete = self._index.update(self._folder, last_step(self._folder), INDEX_S)
            return Answer(encode_index(self._index, None, is_complete=is_complete), SCRIPT)

    def _chunk_script(self, name: str, chunk: int) -> Answer | None:
        with self._index_lock:
            file = next((file for file in self._index.files if file.name == name), None)
        if file is None or chunk >= len(file.chunks):
            return None
        return Answer(encode_chunk(self._folder, file, chunk), SCRIPT)

    def _image(self, path: Path) -> Answer | None:
        try:
            return Answer(path.read_bytes(), IMAGE_TYPES.get(path.suffix[1:], "application/octet-stream"))
        except FileNotFoundError:
            return None


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    server: Server
    protocol_version = "HTTP/1.1"
    timeout = 30.0  # of a connection that says nothing

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        token = parse_qs(url.query).get("token", [""])[0]
        if not self._is_own_host():
            self._send(
                HTTPStatus.FORBIDDEN, Answer(b"Open the run under the address that skyrl watch printed.", "text/plain")
            )
        elif not self._is_allowed(token):
            text = b"This address needs the token that skyrl watch printed: http://HOST:PORT/?token=..."
            self._send(HTTPStatus.UNAUTHORIZED, Answer(text, "text/plain"))
        elif url.path == "/":
            cookie = {"Set-Cookie": f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"} if token else {}
            self._send(HTTPStatus.SEE_OTHER, Answer(b""), {"Location": "/report.html"} | cookie)
        elif url.path == "/favicon.ico":
            self._send(HTTPStatus.NO_CONTENT, Answer(b""))
        else:
            self._send_page(url.path)

    def _send_page(self, address: str) -> None:
        try:
            page = self.server.site.find(address)
        except DataError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, Answer(str(error).encode(), "text/plain; charset=utf-8"))
            return
        if page is None:
            self._send(HTTPStatus.NOT_FOUND, Answer(b"There is nothing at this address.", "text/plain"))
            return
        tag = f'"{blake2b(page.content, digest_size=12).hexdigest()}"'
        is_known = self.headers.get("If-None-Match") == tag
        status = HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK
        self._send(
            status,
            Answer(b"", page.media_type) if is_known else page,
            {"ETag": tag, "Cache-Control": "no-cache", VERSION: page.version},
        )

    def _send(self, status: HTTPStatus, answer: Answer, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        standard = {"Content-Type": answer.media_type, "Content-Length": str(len(answer.content))}
        standard |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in (standard | {"Content-Security-Policy": POLICY} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.content)

    def _is_own_host(self) -> bool:
        """Return True if the Host header is a loopback name, or if a token protects the run anyway."""
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:  # it is not a host at all
            return False
        return self.server.token is not None or is_loopback(host)

    def _is_allowed(self, token: str) -> bool:
        if self.server.token is None:
            return True
        cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        offered = [token, *([cookie.value] if cookie else [])]
        return any(secrets.compare_digest(value.encode(), self.server.token.encode()) for value in offered)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)


class Server(ThreadingHTTPServer):
    """A server of one run. `token` is None on a loopback interface."""

    daemon_threads = True

    def __init__(self, site: Site, host: str, port: int) -> None:
        """Bind the address. Port 0 chooses a free one. Raise DataError if the address cannot be bound."""
        self.site = site
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        self.host = host
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise DataError(
                f"cannot serve on {host}:{port}: {error.strerror}; choose another --port or --host"
            ) from error

    @property
    def address(self) -> str:
        """The URL to open."""
        suffix = "" if self.token is None else f"?token={self.token}"
        return f"http://{self.host}:{self.server_address[1]}/{suffix}"


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and addresses such as 127.0.0.1."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def serving(site: Site, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    """Serve a run in background threads within the context."""
    server = Server(site, host, port)
    thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
