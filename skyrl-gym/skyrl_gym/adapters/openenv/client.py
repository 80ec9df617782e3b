"""A client for OpenEnv's `/ws` protocol. A connection is a session with one environment.

    async with OpenEnvSession("http://127.0.0.1:8000") as session:
        result = await session.reset(seed=3)
        while not result.done:
            result = await session.step({"message": "hello"})

A session never reconnects, because the server would start a new environment in the middle of an episode. After a lost
connection, a timeout or a cancelled call, the session is over, so every later call raises.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from skyrl_gym.adapters.openenv.slots import slots_for
from skyrl_gym.error import Error
from skyrl_gym.runtime.serialization import to_json_value

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
FIRST_WAIT_S, MAX_WAIT_S = 0.1, 5.0

T = TypeVar("T")
_jitter = random.Random()  # separate: the global generator must stay reproducible


class OpenEnvError(Error):
    """Base class for errors of sessions on OpenEnv servers."""


class ServerUnavailable(OpenEnvError):
    """The server cannot be reached, or rejects the handshake."""


class CapacityReached(OpenEnvError):
    """The server has no room for another session (`CAPACITY_REACHED`)."""


class SessionRefused(OpenEnvError):
    """The server could not make an environment for the session (`FACTORY_ERROR`, `SESSION_ERROR`)."""


class SessionLost(OpenEnvError):
    """The session ended before its episode: the connection broke, a reply timed out, or a call was cancelled."""


class InvalidMessage(OpenEnvError):
    """The server rejects the fields of an action or a reset (`VALIDATION_ERROR`). The session continues."""


class ExecutionFailed(OpenEnvError):
    """The environment raised during a reset or a step (`EXECUTION_ERROR`). The session continues."""


class ProtocolError(OpenEnvError):
    """The server sent an unexpected message."""


ERRORS: dict[str, type[OpenEnvError]] = {
    "CAPACITY_REACHED": CapacityReached,
    "EXECUTION_ERROR": ExecutionFailed,
    "FACTORY_ERROR": SessionRefused,
    "SESSION_ERROR": SessionRefused,
    "VALIDATION_ERROR": InvalidMessage,
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Connection options and time limits.

    connect_timeout_s, message_timeout_s, close_timeout_s: for the handshake, for a reply, for the server to disconnect.
    capacity_timeout_s: total time to wait for a slot on a full server.
    ping_interval_s: time between pings. They keep proxies from closing an idle connection.
    ping_timeout_s: time limit for the answer to a ping. None means no limit, since a busy trainer does not read pongs.
    max_message_bytes: maximum size of a message from the server.
    max_sessions: maximum number of sessions of this process on the server. None probes for the capacity.
    headers: of the handshake, e.g. ``{"Authorization": "Bearer …"}``.
    """

    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    close_timeout_s: float = 5.0
    capacity_timeout_s: float = 240.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = None
    max_message_bytes: int = 1 << 24
    max_sessions: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("connect_timeout_s", "message_timeout_s", "close_timeout_s", "capacity_timeout_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a number of seconds above 0")
        for name in ("max_message_bytes", "max_sessions"):
            value = getattr(self, name)
            if (value is not None or name != "max_sessions") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The server's answer to `reset` and `step`, e.g. ``StepResult({"echoed_message": "hi"}, 0.2, False, {})``."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    metadata: dict[str, Any]


def websocket_url(url: str) -> str:
    """Return the URL for sessions, e.g. ``ws://host:8000/ws`` for ``http://host:8000``.

    Raises:
        ValueError: `url` is not the address of a server.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"url={url!r} is not a server's address; use http://host:port, or https://, ws://, wss://")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


def http_url(url: str, route: str) -> str:
    """Return the URL of an HTTP route of the same server, e.g. ``http://host:8000/schema``."""
    parts = urlsplit(websocket_url(url))
    scheme = "https" if parts.scheme == "wss" else "http"
    return urlunsplit((scheme, parts.netloc, parts.path.removesuffix("/ws") + route, "", ""))


class OpenEnvSession:
    """A session, from its first `reset` to `close`. It is bound to the event loop of the first `reset`."""

    def __init__(self, url: str, options: SessionOptions | None = None) -> None:
        """Prepare a session without connecting. Raises ValueError for an invalid URL."""
        self.url = websocket_url(url)
        self.options = options or SessionOptions()
        self._slots = slots_for(self.url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: ClientConnection | None = None
        self._has_slot = False
        self._is_playing = False
        self._end: str | None = None  # the reason why the session is over
        self._lock = threading.Lock()

    async def reset(self, **arguments: Any) -> StepResult:
        """Start an episode. The first call connects, and waits for a slot while the server is full.

        Raises:
            ServerUnavailable, CapacityReached, SessionRefused: the session cannot be opened.
            InvalidMessage, ExecutionFailed: the environment rejects the reset, or fails.
            SessionLost, ProtocolError: the session is over.
        """
        if self._connection is None and self._end is None:
            self._loop = asyncio.get_running_loop()
            deadline = time.monotonic() + self.options.capacity_timeout_s
            try:
                return await self._first_reset(arguments, deadline)
            except BaseException as error:
                self._fail(error)
                raise
        return await self._ask("reset", arguments, "observation", _step_result)

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Send the fields of an action.

        Raises:
            InvalidMessage: the server rejects the fields. The episode continues.
            ExecutionFailed: the environment raised.
            SessionLost, ProtocolError: the session is over.
        """
        return await self._ask("step", action, "observation", _step_result)

    async def state(self) -> dict[str, Any]:
        """Return the environment's state, e.g. ``{"episode_id": "…", "step_count": 3}``. Raises like `step`."""
        return await self._ask("state", None, "state", dict)

    async def close(self) -> None:
        """Close the session on the server, and disconnect after `close_timeout_s` at the latest."""
        if self._loop is not asyncio.get_running_loop():
            return self.abort()
        self._end = self._end or "it was closed"
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                await self._send_close(connection)
        finally:
            self._release_slot()

    def abort(self) -> None:
        """Disconnect without a message. Works from any thread, even if the event loop is gone."""
        self._end = self._end or "it was closed"
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(connection.transport.abort)
        finally:
            self._release_slot()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _first_reset(self, arguments: Mapping[str, Any], deadline: float) -> StepResult:
        """Connect and reset. A full server rejects only the reset, and then disconnects."""
        n_refusals = 0
        while True:
            await self._acquire_slot(deadline)
            self._connection = await self._connect()
            try:
                result = await self._ask("reset", arguments, "observation", _step_result)
            except CapacityReached as refusal:
                n_refusals += 1
                await self._wait_for_capacity(n_refusals, deadline, refusal)
            else:
                self._is_playing = True
                self._slots.record_accepted()
                return result

    async def _acquire_slot(self, deadline: float) -> None:
        if self._has_slot:
            return
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._slots.acquire(self.options.max_sessions)
        except TimeoutError as error:
            raise CapacityReached(self._capacity_message()) from error
        self._has_slot = True

    async def _wait_for_capacity(self, n_refusals: int, deadline: float, refusal: CapacityReached) -> None:
        """Disconnect and wait, longer each time. Release the slot if this process has too many sessions."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()
        if self._slots.record_refused():
            self._release_slot()
        wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(n_refusals - 1, 10)) * _jitter.uniform(0.5, 1.0)
        if time.monotonic() + wait_s > deadline:
            raise CapacityReached(self._capacity_message()) from refusal
        await asyncio.sleep(wait_s)

    def _capacity_message(self) -> str:
        return (
            f"{self.url} had no capacity for this session within "
            f"capacity_timeout_s={self.options.capacity_timeout_s:g}; raise max_concurrent_envs on the server, or "
            "capacity_timeout_s and environment.skyrl_gym.call_timeout_seconds here"
        )

    async def _connect(self) -> ClientConnection:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        options = self.options
        try:
            return await connect(
                self.url,
                additional_headers=dict(options.headers),
                compression=None,
                open_timeout=options.connect_timeout_s,
                close_timeout=options.close_timeout_s,
                ping_interval=options.ping_interval_s,
                ping_timeout=options.ping_timeout_s,
                max_size=options.max_message_bytes,
            )
        except (OSError, WebSocketException) as error:
            raise ServerUnavailable(f"cannot open a session on {self.url}: {error or type(error).__name__}") from error

    async def _ask(
        self, kind: str, content: Mapping[str, Any] | None, answer: str, read: Callable[[dict[str, Any]], T]
    ) -> T:
        """Send a message, and `read` the `data` of its reply. The reply must have the type `answer`.

        Any other reply, except a protocol error, ends the session: a late reply would be taken for the reply to the
        next message.
        """
        if self._connection is None:
            raise SessionLost(f"the session on {self.url} is over: {self._end or 'it was never reset'}")
        try:
            reply = await self._exchange(self._connection, _message(kind, content))
            return read(_content(reply, answer))
        except (InvalidMessage, ExecutionFailed, CapacityReached):
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._end = self._end or str(error) or type(error).__name__
        self.abort()

    async def _exchange(self, connection: ClientConnection, message: str) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.options.message_timeout_s):
                with suppress(ConnectionClosed):  # the server's last message can still be received
                    await connection.send(message)
                return await connection.recv()
        except ConnectionClosed as error:
            is_too_big = error.sent is not None and error.sent.code == 1009
            hint = f"; raise max_message_bytes={self.options.max_message_bytes}" if is_too_big else ""
            raise SessionLost(f"{self.url} disconnected: {error}{hint}") from error
        except TimeoutError as error:
            limit = f"message_timeout_s={self.options.message_timeout_s:g}"
            raise SessionLost(f"{self.url} did not answer within {limit}") from error

    async def _send_close(self, connection: ClientConnection) -> None:
        """Ask the server to close, and wait until it disconnects. Its capacity is then free when this returns."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.options.close_timeout_s):
                await connection.send(_message("close", None))
                await connection.wait_closed()
        except (ConnectionClosed, TimeoutError):
            pass  # the connection is over in either case
        finally:
            connection.transport.abort()

    def _release_slot(self) -> None:
        """Release the slot, once."""
        with self._lock:
            had_slot, self._has_slot = self._has_slot, False
        if had_slot:
            self._slots.release(was_playing=self._is_playing)


def _message(kind: str, content: Mapping[str, Any] | None) -> str:
    message: dict[str, Any] = {"type": kind}
    if content is not None:
        message["data"] = dict(content)
    return json.dumps(message, default=to_json_value)


def _content(reply: str | bytes, expected: str) -> dict[str, Any]:
    """Return the `data` of a reply.

    Raises:
        OpenEnvError: the reply is an error, or has an unexpected type.
    """
    try:
        message = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent a message that is not JSON: {reply[:200]!r}") from error
    kind = message.get("type") if isinstance(message, dict) else None
    content = message.get("data") if isinstance(message, dict) else None
    if kind not in (expected, "error") or not isinstance(content, dict):
        raise ProtocolError(f"the server sent {reply[:200]!r} instead of type={expected!r} with its data")
    return content if kind == expected else _raise(content)


def _raise(error: Mapping[str, Any]) -> NoReturn:
    code = str(error.get("code"))
    details = "".join(f"; {_format_problem(problem)}" for problem in error.get("errors") or [])
    raise ERRORS.get(code, ProtocolError)(f"{code}: {error.get('message')}{details}")


def _format_problem(problem: Any) -> str:
    """Format a validation error and its field."""
    if not isinstance(problem, Mapping) or "msg" not in problem:
        return str(problem)
    field_name = ".".join(map(str, problem.get("loc") or ()))
    return f"{field_name}: {problem['msg']}" if field_name else str(problem["msg"])


def _step_result(content: Mapping[str, Any]) -> StepResult:
    observation, metadata = content.get("observation"), content.get("metadata")
    if not isinstance(observation, Mapping):
        raise ProtocolError(f"the server sent observation={observation!r}, which must be an object")
    return StepResult(
        observation=dict(observation),
        reward=_reward(content.get("reward")),
        done=content.get("done") is True,
        metadata=dict(metadata) if isinstance(metadata, Mapping) else {},
    )


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward) if isinstance(reward, int | float) else math.nan
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ProtocolError(f"the server sent reward={str(reward)[:200]}, which must be a finite number or null")
    return value
