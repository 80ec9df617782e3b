"""An inference engine in another process, over one socket: `RemoteEngine` calls, `serve_engines` answers.

A connection starts with a secret token, unframed. After it, both ends send frames: 8 bytes of length, then a pickled
list of messages. Messages that are queued when the writer runs share a frame, so the token chunks of all streams cost
one frame per engine step. Unpickling can run any code: the token must be shared only by processes of one run.

    client → server    (0, "start", make_engine), (n, method, arguments), (n, "cancel", None)
    server → client    (0, "result", (EngineInfo, n_weight_copies)), (n, "chunk", TokenChunk), (n, "result", value),
                       (n, "error", exception)
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import pickle
import secrets
import socket
import struct
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from skyrl_train.errors import EngineError, picklable_error
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, InferenceEngine, TokenChunk
from skyrl_train.weight_sync import Receipt, SyncPlan

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
MAX_FRAME_BYTES = 1 << 30
TOKEN_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 10.0
START = 0  # number of the first request of a connection

_HEADER = struct.Struct(">Q")

Message = tuple[int, str, Any]  # number of the request, kind, value


class EngineHost(Protocol):
    """The process at the other end of a connection."""

    def describe_end(self) -> str:
        """Return the process's name and its exit status, waiting briefly for it to end. Blocks."""
        ...

    def close(self) -> None:
        """End the process. Blocks."""
        ...


def new_token() -> bytes:
    """Return a secret for the connections to one process."""
    return secrets.token_bytes(TOKEN_BYTES)


def listen(address: str) -> socket.socket:
    """Listen on "host:port" (port 0: any free one), or on the path of a Unix socket."""
    family, target = _parse_address(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(target)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def connect(
    address: str,
    token: bytes,
    make_engine: Callable[[], InferenceEngine],
    host: EngineHost,
    *,
    is_owner: bool = False,
    start_timeout_s: float = 600.0,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> RemoteEngine:
    """Connect to `serve_engines`, let it make an engine, and return the engine once it is ready. Blocks.

    Args:
        make_engine: Pickled and called in the other process, so it must be importable there.
        host: The other process, for error messages.
        is_owner: Whether `RemoteEngine.close` ends the other process too.

    Raises:
        EngineError: the token is wrong, the process ended, or the engine was not ready in time.
        Exception: any error of `make_engine`.
    """
    family, target = _parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        deadline = time.monotonic() + start_timeout_s
        sock.settimeout(start_timeout_s)
        start = pickle.dumps([(START, "start", make_engine)])
        try:
            sock.connect(target)
            sock.sendall(token + _HEADER.pack(len(start)) + start)
            messages = _receive_blocking(sock, max_frame_bytes, deadline)
        except TimeoutError as error:
            raise EngineError(f"the engine was not ready in {start_timeout_s:g} s; raise the start timeout") from error
        except OSError:
            messages = None
        if messages is None:
            raise EngineError(f"{host.describe_end()} before the engine was ready; its own messages are above")
        ((_, kind, value),) = messages
        if kind == "error":
            raise value
        _set_up(sock)
        info, n_weight_copies = value
        return RemoteEngine(sock, info, n_weight_copies, host, is_owner=is_owner, max_frame_bytes=max_frame_bytes)
    except BaseException:
        sock.close()
        raise


@dataclass(slots=True)
class _PendingCall:
    """A request that waits for its result; a stream also waits for chunks, which None ends."""

    done: asyncio.Future[Any]
    chunks: asyncio.Queue[TokenChunk | None] | None = None

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(result)
        if self.chunks is not None:
            self.chunks.put_nowait(None)


class RemoteEngine:
    """An `InferenceEngine` whose calls are carried out in another process.

    The first call binds it to the running event loop. A connection that breaks fails every waiting call and every later
    one: start another engine.
    """

    def __init__(
        self,
        sock: socket.socket,
        info: EngineInfo,
        n_weight_copies: int,
        host: EngineHost,
        *,
        is_owner: bool,
        max_frame_bytes: int,
    ) -> None:
        """Use `connect`, or `skyrl_train.launch.start_engine`, to make one."""
        self.info = info
        self.n_weight_copies = n_weight_copies
        self._sock = sock
        self._host = host
        self._is_owner = is_owner
        self._max_frame_bytes = max_frame_bytes
        self._numbers = count(START + 1)
        self._pending: dict[int, _PendingCall] = {}
        self._channel: _Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._broken_by: str | None = None

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Implement `InferenceEngine.generate`."""
        results: list[EngineResult] = await self._call("generate", list(requests))
        return results

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Implement `InferenceEngine.stream`."""
        number, call = self._send("stream", request, chunks=asyncio.Queue())
        assert call.chunks is not None
        try:
            while (chunk := await call.chunks.get()) is not None:
                yield chunk
            call.done.result()
        finally:
            if number in self._pending:
                self._cancel(number)
            if not call.done.cancel() and not call.done.cancelled():
                call.done.exception()  # a consumer that left before the error has no use for it

    async def abort(self, session_id: str | None = None) -> None:
        """Implement `InferenceEngine.abort`."""
        await self._call("abort", session_id)

    async def pause(self) -> None:
        """Implement `InferenceEngine.pause`."""
        await self._call("pause")

    async def resume(self) -> None:
        """Implement `InferenceEngine.resume`."""
        await self._call("resume")

    async def end_session(self, session_id: str) -> None:
        """Implement `InferenceEngine.end_session`."""
        await self._call("end_session", session_id)

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Implement `InferenceEngine.receive_weights`."""
        if plan.transport == "shared":
            raise EngineError("transport=shared cannot reach an engine in another process; use transport=broadcast")
        receipt: Receipt = await self._call("receive_weights", plan)
        return receipt

    async def sleep(self) -> None:
        """Implement `InferenceEngine.sleep`."""
        await self._call("sleep")

    async def wake_up(self) -> None:
        """Implement `InferenceEngine.wake_up`."""
        await self._call("wake_up")

    async def close(self) -> None:
        """Implement `InferenceEngine.close`. Closing continues when the call is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _call(self, method: str, *args: Any) -> Any:
        number, call = self._send(method, *args)
        try:
            return await call.done
        except asyncio.CancelledError:
            self._cancel(number)  # also if the result has arrived: the caller has not seen it
            raise

    def _send(
        self, method: str, *args: Any, chunks: asyncio.Queue[TokenChunk | None] | None = None
    ) -> tuple[int, _PendingCall]:
        if self._closing is not None:
            raise EngineError("the engine is closed; make another")
        if self._broken_by is not None:
            raise EngineError(self._broken_by)
        number, call = next(self._numbers), _PendingCall(asyncio.get_running_loop().create_future(), chunks)
        self._pending[number] = call
        self._open_channel().send((number, method, args))
        return number, call

    def _cancel(self, number: int) -> None:
        self._pending.pop(number, None)
        self._open_channel().send((number, "cancel", None))

    def _open_channel(self) -> _Channel:
        if self._channel is None:
            self._channel = _Channel(self._sock, self._max_frame_bytes, self._fail)
            self._reading = asyncio.create_task(self._read(self._channel))
        return self._channel

    def _fail(self, number: int, error: EngineError) -> None:
        if call := self._pending.pop(number, None):
            call.finish(error=error)

    def _fail_all(self, message: str) -> None:
        for number in list(self._pending):
            self._fail(number, EngineError(message))  # an error of its own for every caller

    async def _read(self, channel: _Channel) -> None:
        """Deliver what the other process sends until the connection ends."""
        problem = None
        try:
            while (messages := await channel.receive()) is not None:
                for number, kind, value in messages:
                    self._deliver(number, kind, value)
        except Exception as error:  # the boundary of the connection: every caller learns why
            logger.exception("The connection to an engine cannot be read")
            problem = f"the connection to the engine cannot be read: {error}"
        if self._closing is None:
            end = problem or await asyncio.to_thread(self._host.describe_end)
            self._broken_by = f"{end}; start another engine"
            self._fail_all(self._broken_by)

    def _deliver(self, number: int, kind: str, value: Any) -> None:
        if kind == "chunk":
            call = self._pending.get(number)
            if call is not None and call.chunks is not None:
                call.chunks.put_nowait(value)
        elif call := self._pending.pop(number, None):
            call.finish(value) if kind == "result" else call.finish(error=value)

    async def _close(self) -> None:
        channel = self._open_channel()
        assert self._reading is not None
        self._fail_all("the engine was closed while requests were waiting")
        try:
            channel.finish()
            await asyncio.wait([self._reading], timeout=CLOSE_TIMEOUT_S)  # the other end closes its engine first
        finally:
            self._reading.cancel()
            await asyncio.wait([self._reading])
            await channel.close()
            if self._is_owner:
                await asyncio.to_thread(self._host.close)


async def serve_engines(
    listener: socket.socket,
    token: bytes,
    *,
    max_frame_bytes: int = MAX_FRAME_BYTES,
    token_timeout_s: float = TOKEN_TIMEOUT_S,
) -> None:
    """Serve connections, one after the other, until cancelled. Each gets the engine that its first message makes.

    A connection that does not start with `token` is closed; nothing that it sends is unpickled.
    """
    listener.setblocking(False)
    turn = asyncio.Lock()
    async with asyncio.TaskGroup() as connections:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            connections.create_task(_serve_connection(sock, token, turn, max_frame_bytes, token_timeout_s))


async def _serve_connection(
    sock: socket.socket, token: bytes, turn: asyncio.Lock, max_frame_bytes: int, token_timeout_s: float
) -> None:
    _set_up(sock)
    try:
        if not await _sends_token(sock, token, token_timeout_s):
            logger.warning("Refused a connection that did not send the token")
            return
        async with turn:
            await _Server(sock, max_frame_bytes).run()
    except Exception:  # the boundary of a connection: the next one gets another engine
        logger.exception("The connection of an engine failed")
    finally:
        sock.close()


async def _sends_token(sock: socket.socket, token: bytes, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            received = await _receive_exactly(sock, len(token))
    except TimeoutError:
        return False
    return received is not None and hmac.compare_digest(received, token)


class _Server:
    """The serving end of one connection, and its engine."""

    def __init__(self, sock: socket.socket, max_frame_bytes: int) -> None:
        self._channel = _Channel(sock, max_frame_bytes, self._fail)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused_by: int | None = None  # number of the request that paused the engine

    async def run(self) -> None:
        """Make the engine, and carry out calls until the connection ends."""
        engine = None
        try:
            engine = await self._start()
            if engine is not None:
                await self._serve(engine)
        finally:
            if engine is not None:
                await engine.close()
            self._channel.finish()
            await self._channel.close()

    async def _start(self) -> InferenceEngine | None:
        try:
            messages = await self._channel.receive()
            if messages is None:
                return None
            ((_, _, make_engine),) = messages
            engine: InferenceEngine = make_engine()
        except Exception as error:
            logger.exception("An engine could not start")
            self._channel.send((START, "error", picklable_error(error, EngineError)))
            return None
        self._channel.send((START, "result", (engine.info, engine.n_weight_copies)))
        return engine

    async def _serve(self, engine: InferenceEngine) -> None:
        async with asyncio.TaskGroup() as group:
            while (messages := await self._channel.receive()) is not None:
                for number, kind, value in messages:
                    if kind == "cancel":
                        self._cancel(number)
                        if number == self._paused_by:  # its caller left before it knew
                            self._paused_by = None
                            with suppress(EngineError):
                                await engine.resume()
                    else:
                        task = group.create_task(self._carry_out(engine, number, kind, value))
                        self._tasks[number] = task
                        task.add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]
            for task in self._tasks.values():
                task.cancel()

    async def _carry_out(self, engine: InferenceEngine, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = None
            if method == "stream":
                async with aclosing(engine.stream(*args)) as chunks:
                    async for chunk in chunks:
                        self._channel.send((number, "chunk", chunk))
            else:
                value = await getattr(engine, method)(*args)
            if method in ("pause", "resume"):
                self._paused_by = number if method == "pause" else None
            self._channel.send((number, "result", value))
        except Exception as error:  # noqa: BLE001, handed to the caller
            self._channel.send((number, "error", picklable_error(error, EngineError)))

    def _fail(self, number: int, error: EngineError) -> None:
        self._cancel(number)
        self._channel.send((number, "error", error))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()


class _Channel:
    """Messages over one non-blocking socket, sent by a task. Belongs to the running event loop."""

    def __init__(
        self, sock: socket.socket, max_frame_bytes: int, on_unsendable: Callable[[int, EngineError], None]
    ) -> None:
        """`on_unsendable` gets the number of each message that cannot be pickled or is too large, and the error."""
        self._sock = sock
        self._max_frame_bytes = max_frame_bytes
        self._on_unsendable = on_unsendable
        self._outbox: list[Message] = []
        self._wake = asyncio.Event()
        self._is_finishing = False
        self._writing = asyncio.create_task(self._write())

    def send(self, message: Message) -> None:
        """Queue a message."""
        self._outbox.append(message)
        self._wake.set()

    async def receive(self) -> list[Message] | None:
        """Return the messages of the next frame; None once the connection has ended.

        Raises:
            EngineError: the frame is larger than allowed.
        """
        await asyncio.sleep(0)  # frames that are there already must not keep other tasks waiting
        header = await _receive_exactly(self._sock, _HEADER.size)
        if header is None:
            return None
        payload = await _receive_exactly(self._sock, _frame_size(header, self._max_frame_bytes))
        return None if payload is None else pickle.loads(payload)

    def finish(self) -> None:
        """Send the queued messages, then end this direction of the connection."""
        self._is_finishing = True
        self._wake.set()

    async def close(self) -> None:
        """Wait for `finish`, then close the socket."""
        await asyncio.wait([self._writing], timeout=CLOSE_TIMEOUT_S)
        self._writing.cancel()
        await asyncio.wait([self._writing])
        self._sock.close()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # the reading side reports a broken connection
            while self._outbox or not self._is_finishing:
                await self._wake.wait()
                self._wake.clear()
                messages, self._outbox = self._outbox, []
                for frame in self._encode(messages):
                    await loop.sock_sendall(self._sock, frame)
            self._sock.shutdown(socket.SHUT_WR)

    def _encode(self, messages: list[Message]) -> Iterator[bytes]:
        """Yield one frame, or several where one would be too large."""
        if not messages:
            return
        try:
            payload = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
            problem = None
            if len(payload) > self._max_frame_bytes:
                problem = _too_large(len(payload), self._max_frame_bytes)
        except Exception as error:  # noqa: BLE001, handed to the caller
            problem = f"a message cannot be pickled: {error}"
        if problem is None:
            yield _HEADER.pack(len(payload)) + payload
        elif len(messages) == 1:
            self._on_unsendable(messages[0][0], EngineError(problem))
        else:
            half = len(messages) // 2
            yield from self._encode(messages[:half])
            yield from self._encode(messages[half:])


async def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    """Return the next `size` bytes; None if the connection ends before."""
    loop = asyncio.get_running_loop()
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        try:
            n_bytes = await loop.sock_recv_into(sock, rest)
        except OSError:
            return None
        if n_bytes == 0:
            return None
        rest = rest[n_bytes:]
    return received


def _receive_blocking(sock: socket.socket, max_frame_bytes: int, deadline: float) -> list[Message] | None:
    """Return the messages of the next frame; None if the connection ends before."""

    def receive_exactly(size: int) -> bytes | None:
        received = bytearray()
        while len(received) < size:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = sock.recv(size - len(received))
            if not part:
                return None
            received += part
        return bytes(received)

    header = receive_exactly(_HEADER.size)
    payload = header and receive_exactly(_frame_size(header, max_frame_bytes))
    return pickle.loads(payload) if payload else None


def _set_up(sock: socket.socket) -> None:
    """Prepare a connected socket for an event loop, and for small messages."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _frame_size(header: bytes | bytearray, max_frame_bytes: int) -> int:
    size: int = _HEADER.unpack(header)[0]
    if size > max_frame_bytes:
        raise EngineError(_too_large(size, max_frame_bytes))
    return size


def _too_large(size: int, max_frame_bytes: int) -> str:
    return (
        f"a message of {size:,} bytes exceeds max_frame_bytes={max_frame_bytes:,}; send fewer requests in one call or "
        "raise the limit"
    )


def _parse_address(address: str) -> tuple[socket.AddressFamily, Any]:
    if address.startswith("/"):
        return socket.AF_UNIX, address
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))
