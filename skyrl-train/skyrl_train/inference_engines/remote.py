"""Remote calls to an object in another process over one socket: an inference engine or the HTTP endpoint.

`RemoteClient` calls and `serve` answers. A connection starts with a secret token, unframed. After that, both ends send
messages through a `Channel`:

    client → server    (0, "start", (pickled make, names of attributes)), (n, method, arguments), (n, "cancel", None)
    server → client    (0, "result", values of the attributes), (n, "chunk", TokenChunk), (n, "result", value),
                       (n, "error", exception)
"""

import asyncio
import hmac
import logging
import pickle
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext, suppress
from itertools import count
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from skyrl_train.errors import EngineError, EngineLostError, picklable_error
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, TokenChunk, WakeUp
from skyrl_train.inference_engines.channel import (
    CLOSE_TIMEOUT_S,
    Channel,
    encode,
    parse_address,
    receive_blocking,
    receive_exactly,
)
from skyrl_train.watchdog import ENGINE, Wait
from skyrl_train.weight_sync import Receipt, SyncPlan

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
TOKEN_TIMEOUT_S = 10.0
SAMPLING = {"generate", "stream"}  # methods that wait for tokens
START = 0  # number of the first request of a connection


def new_token() -> bytes:
    """Create a secret for the connections to one process."""
    return secrets.token_bytes(TOKEN_BYTES)


class _PendingCall(NamedTuple):
    """A call that waits for its result. A stream also has a queue of chunks."""

    done: asyncio.Future[Any]
    chunks: asyncio.Queue[TokenChunk | None] | None


class RemoteClient:
    """A client for an object in another process.

    The first call binds the client to the running event loop. If the connection breaks, all waiting and later calls
    fail.
    """

    ATTRIBUTES: ClassVar[tuple[str, ...]] = ()  # attributes of the object that are copied to the client
    SLOW_START_ADVICE: ClassVar[str] = ""  # end of the error message if the object is not ready in time

    def __init__(
        self,
        address: str,
        token: bytes,
        make: Callable[[], Any] | None,
        describe_end: Callable[[], str],
        end_process: Callable[[], None] | None = None,
        *,
        start_timeout_s: float = 600.0,
    ) -> None:
        """Connect to `serve`, let it make the object, and wait until it is ready. Blocks. Raises any error of `make`.

        Args:
            make: pickled and called in the other process. Pickled by value if it is defined in `__main__`. None for
                the object that the other process shares.
            describe_end: returns the name and exit status of the other process, for error messages. May block.
            end_process: called by `close`, e.g. to end the other process. May block.

        Raises:
            EngineError: the token is wrong, the process ended, or the object was not ready in time.
        """
        try:
            pickled = None if make is None else cloudpickle.dumps(make)  # by value, with what it uses from `__main__`
        except Exception as error:
            raise EngineError(
                f"an engine cannot be made in another process: {error}; keep locks, sockets and threads out of the "
                "attributes of the experiment"
            ) from error
        family, target = parse_address(address)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._sock.settimeout(start_timeout_s)
            start = encode([(START, "start", (pickled, self.ATTRIBUTES))])
            try:
                self._sock.connect(target)
                self._sock.sendall(token + start)
                ((_, kind, value),) = receive_blocking(self._sock)
            except TimeoutError as error:
                raise EngineError(
                    f"the engine was not ready in {start_timeout_s:g} s{self.SLOW_START_ADVICE}"
                ) from error
            except (OSError, EOFError) as error:
                raise EngineError(f"{describe_end()} before the engine was ready; see its output above") from error
            if kind == "error":
                raise value
        except BaseException:
            self._sock.close()
            raise
        vars(self).update(zip(self.ATTRIBUTES, value, strict=True))
        self._describe_end = describe_end
        self._end_process = end_process
        self._numbers = count(START + 1)
        self._pending: dict[int, _PendingCall] = {}
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._broken_by: str | None = None

    async def close(self) -> None:
        """Close the object and the connection. Cancelling the caller does not interrupt this."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    @property
    def is_broken(self) -> bool:
        """True once the connection has ended without `close`."""
        return self._broken_by is not None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and return its result. EngineLostError if its process has ended."""
        number, done = self._send(method, *args)
        try:
            return await done
        except asyncio.CancelledError:
            self._cancel(number)  # even if the result has arrived, because the caller has not seen it
            raise

    def _send(
        self, method: str, *args: Any, chunks: asyncio.Queue[TokenChunk | None] | None = None
    ) -> tuple[int, asyncio.Future[Any]]:
        if self._closing is not None:
            raise EngineError("the engine is closed; create a new one")
        if self._broken_by is not None:
            raise EngineLostError(self._broken_by)
        number, done = next(self._numbers), asyncio.get_running_loop().create_future()
        self._pending[number] = _PendingCall(done, chunks)
        self._open_channel().send((number, method, args))
        return number, done

    def _cancel(self, number: int) -> None:
        self._pending.pop(number, None)
        self._open_channel().send((number, "cancel", None))

    def _open_channel(self) -> Channel:
        if self._channel is None:
            self._channel = Channel(self._sock, lambda number, error: self._deliver(number, "error", error))
            self._reading = asyncio.create_task(self._read(self._channel))
        return self._channel

    async def _read(self, channel: Channel) -> None:
        """Deliver messages from the other process until the connection ends."""
        problem = None
        try:
            while (messages := await channel.receive()) is not None:
                for number, kind, value in messages:
                    self._deliver(number, kind, value)
        except Exception as error:  # the boundary of the connection: all callers get the error
            logger.exception("Cannot read the connection to an engine")
            problem = f"the connection to the engine cannot be read: {error}"
        if self._closing is None:
            problem = problem or await asyncio.to_thread(self._describe_end)
            self._broken_by = f"{problem}; start another engine"
            self._fail_all(self._broken_by, EngineLostError)

    def _deliver(self, number: int, kind: str, value: Any) -> None:
        call = self._pending.get(number) if kind == "chunk" else self._pending.pop(number, None)
        if call is None or call.done.done():
            return
        if kind == "error":
            call.done.set_exception(value)
        elif kind == "result":
            call.done.set_result(value)
        elif call.chunks is not None:
            call.chunks.put_nowait(value)

    def _fail_all(self, message: str, kind: type[EngineError] = EngineError) -> None:
        for number in list(self._pending):
            self._deliver(number, "error", kind(message))  # a separate error object for each caller

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
            if self._end_process is not None:
                await asyncio.to_thread(self._end_process)


class RemoteEngine(RemoteClient):
    """An `InferenceEngine` that runs in another process. If the process ends, start a new engine."""

    ATTRIBUTES = ("info", "n_weight_copies")
    SLOW_START_ADVICE = "; raise generator.engine_start_timeout_seconds"

    info: EngineInfo
    n_weight_copies: int

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        return await self.call("generate", list(requests))

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        chunks: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        number, done = self._send("stream", request, chunks=chunks)
        done.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            done.result()
        finally:
            if number in self._pending:
                self._cancel(number)
            if not done.cancel() and not done.cancelled():
                done.exception()  # mark the error as retrieved: the consumer has left and does not need it

    async def abort(self, session_id: str | None = None) -> None:
        await self.call("abort", session_id)

    async def pause(self) -> None:
        await self.call("pause")

    async def resume(self) -> None:
        await self.call("resume")

    async def end_session(self, session_id: str) -> None:
        await self.call("end_session", session_id)

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        if plan.transport == "shared":
            raise EngineError("transport=shared cannot reach an engine in another process; use transport=auto")
        return await self.call("receive_weights", plan)

    async def sleep(self) -> None:
        await self.call("sleep")

    async def wake_up(self, what: WakeUp = "all") -> None:
        await self.call("wake_up", what)

    async def check_health(self) -> None:
        await self.call("check_health")


async def serve(listener: socket.socket, token: bytes, shared: Any = None) -> None:
    """Serve connections one at a time until cancelled. The first message of a connection makes the object to call.

    If it makes none, the connection uses the `shared` object, and that object stays open afterwards. A connection that
    does not start with `token` is closed before any of its bytes are unpickled.
    """
    listener.setblocking(False)
    turn = asyncio.Lock()
    async with asyncio.TaskGroup() as connections:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            connections.create_task(_serve_connection(sock, token, turn, shared))


async def _serve_connection(sock: socket.socket, token: bytes, turn: asyncio.Lock, shared: Any) -> None:
    received = None
    try:
        sock.setblocking(False)
        with suppress(TimeoutError):
            async with asyncio.timeout(TOKEN_TIMEOUT_S):
                received = await receive_exactly(sock, len(token))
        if received is None or not hmac.compare_digest(received, token):
            logger.warning("Refused a connection that did not send the token")
            return
        async with turn:
            await _RPCServer(sock, shared).run()
    except Exception:  # the boundary of a connection: the next connection gets a new object
        logger.exception("A connection failed")
    finally:
        sock.close()


class _RPCServer:
    """The serving end of one connection."""

    def __init__(self, sock: socket.socket, shared: Any) -> None:
        self._channel = Channel(sock, self._fail)
        self._shared = shared
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused_by: int | None = None  # number of the request that paused the engine

    async def run(self) -> None:
        """Make the object and execute calls until the connection ends."""
        served = None
        try:
            try:
                messages = await self._channel.receive()
                if messages is None:
                    return
                ((_, _, (make, names)),) = messages
                served = self._shared if make is None else pickle.loads(make)()
            except Exception as error:
                logger.exception("An engine could not start")
                self._channel.send((START, "error", picklable_error(error, EngineError)))
                return
            self._channel.send((START, "result", tuple(getattr(served, name) for name in names)))
            await self._serve(served)
        finally:
            if served is not None and served is not self._shared:
                await served.close()
            await self._channel.close()

    async def _serve(self, served: Any) -> None:
        async with asyncio.TaskGroup() as group:
            while (messages := await self._channel.receive()) is not None:
                for number, kind, value in messages:
                    if kind == "cancel":
                        self._cancel(number)
                        if number == self._paused_by:  # the caller was cancelled before it learned of the pause
                            self._paused_by = None
                            with suppress(EngineError):
                                await served.resume()
                    else:
                        task = group.create_task(self._carry_out(served, number, kind, value))
                        self._tasks[number] = task
                        task.add_done_callback(lambda _, number=number: self._tasks.pop(number))  # type: ignore[misc]
            for task in self._tasks.values():
                task.cancel()

    async def _carry_out(self, served: Any, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = None
            with Wait(ENGINE, f"request {number} of another process", method) if method in SAMPLING else nullcontext():
                if method == "stream":
                    async with aclosing(served.stream(*args)) as chunks:
                        async for chunk in chunks:
                            self._channel.send((number, "chunk", chunk))
                else:
                    value = await getattr(served, method)(*args)
            if method in ("pause", "resume"):
                self._paused_by = number if method == "pause" else None
            self._channel.send((number, "result", value))
        except Exception as error:  # noqa: BLE001, sent to the caller
            self._channel.send((number, "error", picklable_error(error, EngineError)))

    def _fail(self, number: int, error: EngineError) -> None:
        self._cancel(number)
        self._channel.send((number, "error", error))

    def _cancel(self, number: int) -> None:
        if task := self._tasks.get(number):
            task.cancel()
