"""A client of the protocol that OpenEnv's servers speak on `/ws`: a connection is a session, and plays one environment.

    async with OpenEnvSession("http://127.0.0.1:8000") as session:
        result = await session.reset(seed=3)
        while not result.done:
            result = await session.step({"message": "hello"})

A session never connects again by itself: the server would hand out a new environment in the middle of an episode.
After a lost connection, a timeout or a cancelled call it is over, and every further call says so.
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

from skyrl_gym.adapters.openenv_places import places_of
from skyrl_gym.error import Error
from skyrl_gym.serialization import plain

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0

T = TypeVar("T")
_jitter = random.Random()  # its own: nobody else's numbers change


class OpenEnvError(Error):
    """The root of what goes wrong between us and an OpenEnv server."""


class ServerUnavailable(OpenEnvError):
    """No connection comes about: nobody listens there, or whoever does refuses the handshake."""


class CapacityReached(OpenEnvError):
    """The server has no room for another session (`CAPACITY_REACHED`)."""


class SessionRefused(OpenEnvError):
    """The server could not make an environment for the session (`FACTORY_ERROR`, `SESSION_ERROR`)."""


class SessionLost(OpenEnvError):
    """The session is over, before its episode was: the connection broke, a reply did not come, a call was cancelled."""


class InvalidMessage(OpenEnvError):
    """The server does not accept the fields of an action, or of a reset (`VALIDATION_ERROR`). The session goes on."""


class ExecutionFailed(OpenEnvError):
    """The environment raised while it was reset or stepped (`EXECUTION_ERROR`). The session goes on."""


class ProtocolError(OpenEnvError):
    """The server said something that is no answer to what it was asked."""


ERRORS: dict[str, type[OpenEnvError]] = {
    "CAPACITY_REACHED": CapacityReached,
    "EXECUTION_ERROR": ExecutionFailed,
    "FACTORY_ERROR": SessionRefused,
    "SESSION_ERROR": SessionRefused,
    "VALIDATION_ERROR": InvalidMessage,
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session connects, and how long it waits.

    connect_timeout_s, message_timeout_s, close_timeout_s: for the handshake, for a reply, for the server to hang up.
    capacity_timeout_s: how long to wait, in all, for a place on a server that is full.
    ping_interval_s: a ping now and then keeps proxies from closing an idle connection.
    ping_timeout_s: how long to wait for the answer to a ping; None does not: while a process trains, nobody reads.
    max_message_bytes: of what the server says.
    max_sessions: how many this process opens on that server at once; None finds out how many it has room for.
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
    """What the server answers to `reset` and `step`, e.g. ``StepResult({"echoed_message": "hi"}, 0.2, False, {})``."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    metadata: dict[str, Any]


def websocket_url(url: str) -> str:
    """Where sessions are opened, e.g. ``ws://host:8000/ws`` for ``http://host:8000``.

    Raises:
        ValueError: `url` is none of a server.
    """
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in SCHEMES or not parts.hostname:
        raise ValueError(f"url={url!r} is no address of a server; write http://host:port, or https://, ws://, wss://")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/ws") else f"{path}/ws"
    return urlunsplit((SCHEMES[parts.scheme], parts.netloc, path, parts.query, ""))


def http_url(url: str, route: str) -> str:
    """The address of an HTTP route of the same server, e.g. ``http://host:8000/schema``."""
    parts = urlsplit(websocket_url(url))
    scheme = "https" if parts.scheme == "wss" else "http"
    return urlunsplit((scheme, parts.netloc, parts.path.removesuffix("/ws") + route, "", ""))


class OpenEnvSession:
    """One session, from its first `reset` to `close`. It belongs to the event loop of the first `reset`."""

    def __init__(self, url: str, options: SessionOptions | None = None) -> None:
        """Nothing is opened yet. Raises ValueError for what is no URL."""
        self.url = websocket_url(url)
        self.options = options or SessionOptions()
        self._places = places_of(self.url)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connection: ClientConnection | None = None
        self._has_place = False
        self._is_playing = False
        self._end: str | None = None  # why the session is over
        self._lock = threading.Lock()

    async def reset(self, **arguments: Any) -> StepResult:
        """Begin an episode. The first time, connect, and wait for a place while the server is full.

        Raises:
            ServerUnavailable, CapacityReached, SessionRefused: there is no session.
            InvalidMessage, ExecutionFailed: the environment does not begin.
            SessionLost, ProtocolError: see there.
        """
        if self._connection is None and self._end is None:
            return await self._begin(arguments)
        return await self._ask("reset", arguments, "observation", _step_result)

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Send the fields of an action.

        Raises:
            InvalidMessage: the server does not accept them; the episode goes on.
            ExecutionFailed: the environment raised.
            SessionLost, ProtocolError: see there.
        """
        return await self._ask("step", action, "observation", _step_result)

    async def state(self) -> dict[str, Any]:
        """What the environment says of itself, e.g. ``{"episode_id": "…", "step_count": 3}``; raises as `step`."""
        return await self._ask("state", None, "state", dict)

    async def close(self) -> None:
        """Say goodbye and hang up. A server that does not answer, or no longer can, is left at once or soon."""
        if self._loop is not asyncio.get_running_loop():
            return self.abort()
        self._end = self._end or "it was closed"
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                await self._say_goodbye(connection)
        finally:
            self._leave()

    def abort(self) -> None:
        """Hang up without a word; from any thread, also when the event loop is gone."""
        self._end = self._end or "it was closed"
        connection, self._connection = self._connection, None
        try:
            if connection is not None and self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(connection.transport.abort)
        finally:
            self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _begin(self, arguments: Mapping[str, Any]) -> StepResult:
        self._loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self.options.capacity_timeout_s
        try:
            return await self._first_reset(arguments, deadline)
        except BaseException as error:
            self._lose(error)
            raise

    async def _first_reset(self, arguments: Mapping[str, Any], deadline: float) -> StepResult:
        """Connect and reset. A server that is full says so only now, and hangs up."""
        n_refusals = 0
        while True:
            await self._take_place(deadline)
            self._connection = await self._connect()
            try:
                result = await self._ask("reset", arguments, "observation", _step_result)
            except CapacityReached as refusal:
                n_refusals += 1
                await self._wait_for_capacity(n_refusals, deadline, refusal)
            else:
                self._is_playing = True
                self._places.accepted()
                return result

    async def _take_place(self, deadline: float) -> None:
        if self._has_place:
            return
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._places.take(self.options.max_sessions)
        except TimeoutError as error:
            raise CapacityReached(self._no_place()) from error
        self._has_place = True

    async def _wait_for_capacity(self, n_refusals: int, deadline: float, refusal: CapacityReached) -> None:
        """Hang up, and wait a while: longer each time, or for one of this process who has found a place."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.abort()
        if self._places.refused():
            self._leave()
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(n_refusals - 1, 10)) * _jitter.uniform(0.5, 1.0)
        if time.monotonic() + wait_s > deadline:
            raise CapacityReached(self._no_place()) from refusal
        await asyncio.sleep(wait_s)

    def _no_place(self) -> str:
        return (
            f"{self.url} had no place for this session within capacity_timeout_s={self.options.capacity_timeout_s:g}; "
            "raise max_concurrent_envs on the server, or capacity_timeout_s and environment.skyrl_gym."
            "call_timeout_seconds here"
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
        """Send a message; `read` the `data` of the reply to it, which must be of the type `answer`.

        What is neither an answer nor an error of the protocol ends the session: a reply that comes late would be taken
        for the reply to something else.
        """
        if self._connection is None:
            raise SessionLost(f"the session on {self.url} is over: {self._end or 'it was never reset'}")
        try:
            reply = await self._exchange(self._connection, _message(kind, content))
            return read(_content(reply, answer))
        except (InvalidMessage, ExecutionFailed, CapacityReached):
            raise
        except BaseException as error:
            self._lose(error)
            raise

    def _lose(self, error: BaseException) -> None:
        self._end = self._end or str(error) or type(error).__name__
        self.abort()

    async def _exchange(self, connection: ClientConnection, message: str) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.options.message_timeout_s):
                with suppress(ConnectionClosed):  # what the server said before it hung up is still to be read
                    await connection.send(message)
                return await connection.recv()
        except ConnectionClosed as error:
            raise SessionLost(f"{self.url} hung up: {error}{self._size_hint(error)}") from error
        except TimeoutError as error:
            limit = f"message_timeout_s={self.options.message_timeout_s:g}"
            raise SessionLost(f"{self.url} did not answer within {limit}") from error

    def _size_hint(self, error: Any) -> str:
        is_too_big = error.sent is not None and error.sent.code == 1009
        return f"; raise max_message_bytes={self.options.max_message_bytes}" if is_too_big else ""

    async def _say_goodbye(self, connection: ClientConnection) -> None:
        """The server hangs up once it has put the environment away, so that its place is free when this returns."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(self.options.close_timeout_s):
                await connection.send(_message("close", None))
                await connection.wait_closed()
        except (ConnectionClosed, TimeoutError):
            pass  # either way the connection is over
        finally:
            connection.transport.abort()

    def _leave(self) -> None:
        """Give the place back, once."""
        with self._lock:
            had_place, self._has_place = self._has_place, False
        if had_place:
            self._places.give_back(was_playing=self._is_playing)


def _message(kind: str, content: Mapping[str, Any] | None) -> str:
    message: dict[str, Any] = {"type": kind}
    if content is not None:
        message["data"] = dict(content)
    return json.dumps(message, default=plain)


def _content(reply: str | bytes, expected: str) -> dict[str, Any]:
    """The `data` of a reply.

    Raises:
        OpenEnvError: the reply is an error, or not what was asked for.
    """
    try:
        message = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server sent what is no JSON: {reply[:200]!r}") from error
    kind = message.get("type") if isinstance(message, dict) else None
    content = message.get("data") if isinstance(message, dict) else None
    if kind not in (expected, "error") or not isinstance(content, dict):
        raise ProtocolError(f"the server sent {reply[:200]!r} instead of type={expected!r} with its data")
    return content if kind == expected else _raise(content)


def _raise(error: Mapping[str, Any]) -> NoReturn:
    code = str(error.get("code"))
    details = "".join(f"; {_where(problem)}" for problem in error.get("errors") or [])
    raise ERRORS.get(code, ProtocolError)(f"{code}: {error.get('message')}{details}")


def _where(problem: Any) -> str:
    """What a validator says is wrong, and in which field."""
    if not isinstance(problem, Mapping) or "msg" not in problem:
        return str(problem)
    place = ".".join(map(str, problem.get("loc") or ()))
    return f"{place}: {problem['msg']}" if place else str(problem["msg"])


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
