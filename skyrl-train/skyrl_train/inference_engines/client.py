"""Several engines behind the interface of one: routing by session, and replacement of lost engines."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from skyrl_gym.stop_reasons import StopReason
from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.errors import EngineError, EngineLostError, SyncError
from skyrl_train.inference_engines.base import (
    EngineInfo,
    EngineRequest,
    EngineResult,
    InferenceEngine,
    TokenChunk,
    WakeUp,
)
from skyrl_train.weight_sync import Receipt, SyncPlan, WeightSync

logger = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 30.0
HEALTH_TIMEOUT_S = 60.0
MAX_REPLACEMENTS = 3  # per engine and run

ABORTED = EngineResult([], [], StopReason.ABORT, ())

Restart = Callable[[int], Awaitable[InferenceEngine]]
"""A function that starts a replacement for the engine with this index."""


class EngineClient:
    """An `InferenceEngine` over several engines with the same model.

    A session starts on the engine with the fewest sessions and running requests, and stays there. An engine is replaced
    if its process ends or stops answering. Its requests are then sampled again. They get the same tokens unless the
    weights have changed or the backend ignores seeds, like vLLM's own sampler.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        restart: Restart | None = None,
        enter: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Take ownership of the engines. `close` closes them.

        Args:
            restart: starts replacements. Without it, the requests of a lost engine fail.
            enter: called before requests. Wakes up the engines if they share their devices with models.

        Raises:
            EngineError: the engines hold weights in different types.
        """
        self._engines = list(engines)
        self._restart = restart
        self._enter = enter
        self._sync: WeightSync | None = None
        dtypes = [engine.info.weight_dtype for engine in engines]
        if len(set(dtypes)) > 1:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise EngineError(f"engines hold weights in different types: {names}; start all with the same dtype")
        self.info = EngineInfo(
            min(engine.info.context_length for engine in engines),
            min(engine.info.longest_sequence for engine in engines),
            dtypes[0],
            all(engine.info.reads_images for engine in engines),
        )
        self._homes: dict[str, int] = {}  # engine index of each session
        self._n_running = [0] * len(engines)  # requests
        self._n_replaced = [0] * len(engines)
        self._is_gone = [False] * len(engines)  # closed and not replaced yet
        self._replacing = [asyncio.Lock() for _ in engines]
        self._aborted: Counter[str | None] = Counter()  # calls to `abort` by session
        self._version: int | None = None  # of the last weights received
        self._synced = self._engines.copy()  # receivers in the last weight sync, even if it failed
        self._has_current_weights: Callable[[], bool] = lambda: True
        self._held: set[InferenceEngine] = set()  # paused until the next sync
        self._is_paused, self._is_asleep, self._is_closed = False, False, False
        self._has_weights = True  # in memory
        self._watching: asyncio.Task[None] | None = None

    @property
    def n_weight_copies(self) -> int:
        return sum(engine.n_weight_copies for engine in self._engines)

    def follow(self, sync: WeightSync, has_current_weights: Callable[[], bool] = lambda: True) -> None:
        """Use `sync`, this client's weight sync, to send the current weights to replacements.

        If a sync fails, it then replaces lost engines and sends the weights once more. `has_current_weights` must
        return False while an update changes the weights. Replacements then stay paused until the next sync.
        """
        self._sync = sync
        self._has_current_weights = has_current_weights
        sync.recover = self._replace_lost

    # -- requests

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        await self._prepare()
        rows: dict[int, list[int]] = {}
        for row, index in enumerate(self._route(requests)):
            rows.setdefault(index, []).append(row)
        parts = await gather_or_cancel(
            self._generate(index, [requests[row] for row in part]) for index, part in rows.items()
        )
        results: dict[int, EngineResult] = {}
        for part, found in zip(rows.values(), parts, strict=True):
            results |= zip(part, found, strict=True)
        return [results[row] for row in range(len(requests))]

    async def _generate(self, index: int, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        n_aborts = [self._n_aborts(request) for request in requests]
        rows = list(range(len(requests)))
        results: dict[int, EngineResult] = {}
        with self._running(index, len(requests)):
            while rows and not results:
                engine = self._engines[index]
                try:
                    results = dict(zip(rows, await engine.generate([requests[row] for row in rows]), strict=True))
                except EngineError as error:
                    await self._recover(index, engine, error)
                    rows = [row for row in rows if self._n_aborts(requests[row]) == n_aborts[row]]
        return [results.get(row, ABORTED) for row in range(len(requests))]

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        await self._prepare()
        (index,), n_aborts = self._route([request]), self._n_aborts(request)
        received: list[int] = []
        with self._running(index, 1):
            while True:
                engine, n_streamed = self._engines[index], 0
                try:
                    async with aclosing(engine.stream(request)) as chunks:
                        async for chunk in chunks:
                            n_old = min(len(chunk.token_ids), len(received) - n_streamed)
                            if chunk.token_ids[:n_old] != received[n_streamed : n_streamed + n_old]:
                                raise EngineError(
                                    "an engine was lost while it streamed, and its replacement sampled other tokens: "
                                    "the weights have changed, or the engine ignores seeds; repeat the request"
                                )
                            new = replace(chunk, token_ids=chunk.token_ids[n_old:], logprobs=chunk.logprobs[n_old:])
                            received += new.token_ids
                            n_streamed += len(chunk.token_ids)
                            if new.token_ids or new.result is not None:
                                yield new
                    return
                except EngineError as error:
                    await self._recover(index, engine, error)
                if self._n_aborts(request) != n_aborts:
                    yield TokenChunk([], [], ABORTED)
                    return

    async def abort(self, session_id: str | None = None) -> None:
        self._aborted[session_id] += 1
        await self._on_all(lambda engine: engine.abort(session_id))

    async def end_session(self, session_id: str) -> None:
        index = self._homes.pop(session_id, None)
        del self._aborted[session_id]
        if index is not None:
            with suppress(EngineError):  # a lost engine has no sessions
                await self._engines[index].end_session(session_id)

    def _route(self, requests: Sequence[EngineRequest]) -> list[int]:
        """Return the engine index for each request."""
        n_sessions = Counter(self._homes.values())
        loads = [n_sessions[index] + n for index, n in enumerate(self._n_running)]
        indices = []
        for request in requests:
            index = self._homes.get(request.session_id) if request.session_id is not None else None
            if index is None:
                index = min(range(len(loads)), key=loads.__getitem__)
                loads[index] += 1
                if request.session_id is not None:
                    self._homes[request.session_id] = index
            indices.append(index)
        return indices

    def _n_aborts(self, request: EngineRequest) -> int:
        """Return how many calls to `abort` concerned this request so far."""
        return self._aborted[None] + (0 if request.session_id is None else self._aborted[request.session_id])

    @contextmanager
    def _running(self, index: int, n_requests: int) -> Iterator[None]:
        self._n_running[index] += n_requests
        try:
            yield
        finally:
            self._n_running[index] -= n_requests

    # -- all engines

    async def pause(self) -> None:
        if self._is_paused:
            raise EngineError("the engine is paused already; call resume() first")
        self._is_paused = True
        try:
            await self._on_all(self._pause)  # replacements start paused
        except BaseException:
            self._is_paused = False
            for engine in self._engines:
                with suppress(EngineError):  # not paused, or lost
                    if engine not in self._held:
                        await engine.resume()
            raise

    async def _pause(self, engine: InferenceEngine) -> None:
        if engine not in self._held:
            await engine.pause()

    async def resume(self) -> None:
        if not self._is_paused:
            raise EngineError("the engine is not paused")
        self._is_paused = False
        self._held.clear()
        await self._on_all(lambda engine: engine.resume())

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        if sum(self._n_running) and not self._is_paused:
            raise EngineError(
                f"weights changed to version {plan.version} while {sum(self._n_running)} sequences were being "
                "generated; call pause() first, or wait for generate() to return"
            )
        plans, rank = [], plan.rank
        for engine in self._engines:
            plans.append(replace(plan, rank=rank))
            rank += engine.n_weight_copies
        self._synced = self._engines.copy()
        receipts = await gather_or_cancel(
            engine.receive_weights(part) for engine, part in zip(self._engines, plans, strict=True)
        )
        if len(set(receipts)) > 1:
            raise SyncError(f"the engines received different weights: {receipts}")
        self._version = plan.version
        return receipts[0]

    async def sleep(self) -> None:
        if n_running := sum(self._n_running):
            raise EngineError(f"the engine cannot sleep while {n_running} sequences are being generated")
        for replacing in self._replacing:  # an engine that is starting needs its memory
            async with replacing:
                pass
        self._is_asleep, self._has_weights = True, False
        await self._on_all(lambda engine: engine.sleep())  # lost engines are replaced after wake-up

    async def wake_up(self, what: WakeUp = "all") -> None:
        if not self._is_asleep:
            return
        await self._on_all(lambda engine: engine.wake_up(what))
        self._is_asleep, self._has_weights = what != "all", True

    async def check_health(self) -> None:
        await gather_or_cancel(engine.check_health() for engine in self._engines)

    async def close(self) -> None:
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await gather_or_cancel(engine.close() for engine in self._engines)

    async def _on_all(self, call: Callable[[InferenceEngine], Coroutine[Any, Any, None]]) -> None:
        """Call all engines, except lost ones."""

        async def run(index: int, engine: InferenceEngine) -> None:
            try:
                await call(engine)
            except EngineError as error:
                if not self._is_lost(index, engine, error):
                    raise

        await gather_or_cancel(run(index, engine) for index, engine in enumerate(self._engines))

    # -- lost engines

    async def _replace_lost(self) -> bool:
        """Replace all engines that do not answer, or raise EngineError. Return True if one lacks the last weights."""
        await gather_or_cancel(self._replace_if_lost(index, sends_weights=False) for index in range(len(self._engines)))
        return self._engines != self._synced

    async def _recover(self, index: int, engine: InferenceEngine, error: EngineError) -> None:
        """Replace an engine if `error` means that it was lost. Otherwise raise `error`."""
        if not self._is_lost(index, engine, error):
            raise error
        await self._replace(index, engine, error, sends_weights=True)

    def _is_lost(self, index: int, engine: InferenceEngine, error: EngineError) -> bool:
        """Return True if `error` means that an engine was lost, or was closed because it is being replaced."""
        is_replaced = self._replacing[index].locked() or self._engines[index] is not engine
        return is_replaced or self._is_gone[index] or isinstance(error, EngineLostError)

    async def _prepare(self) -> None:
        """Wake up the engines for requests, and start watching them."""
        if self._enter is not None:
            await self._enter()
        if self._watching is None and self._restart is not None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Keep replacing engines that no longer answer. Only log failures: requests fail with the same errors."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            replacing = (self._replace_if_lost(index, sends_weights=True) for index in range(len(self._engines)))
            for index, error in enumerate(await asyncio.gather(*replacing, return_exceptions=True)):
                if error is not None:
                    logger.warning("%s could not be replaced: %s", self._name(index).capitalize(), error)

    async def _replace_if_lost(self, index: int, *, sends_weights: bool) -> None:
        engine = self._engines[index]
        error: EngineError | None = None
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                await engine.check_health()
        except TimeoutError:
            error = EngineLostError(f"{self._name(index)} did not answer for {HEALTH_TIMEOUT_S:g} s")
        except EngineError as failure:
            if not self._is_lost(index, engine, failure):
                raise
            error = failure
        if error is not None and self._has_weights:  # while it sleeps, models use its devices
            await self._replace(index, engine, error, sends_weights=sends_weights)

    async def _replace(self, index: int, lost: InferenceEngine, error: EngineError, *, sends_weights: bool) -> None:
        """Start a replacement for a lost engine, unless another task has already done so."""
        async with self._replacing[index]:
            if self._engines[index] is not lost:
                return
            if self._restart is None or self._is_closed:
                raise error
            if self._n_replaced[index] == MAX_REPLACEMENTS:
                raise EngineLostError(
                    f"{self._name(index)} was lost {MAX_REPLACEMENTS + 1} times; the last time: {error}"
                )
            self._n_replaced[index] += 1
            logger.warning("%s was lost and is replaced: %s", self._name(index).capitalize(), error)
            self._is_gone[index] = True
            with suppress(EngineError):
                await lost.close()
            engine = await self._restart(index)
            try:
                await self._prepare_replacement(index, engine, sends_weights=sends_weights)
            except BaseException:
                await engine.close()
                raise
            self._engines[index], self._is_gone[index] = engine, False

    async def _prepare_replacement(self, index: int, engine: InferenceEngine, *, sends_weights: bool) -> None:
        """Bring a new engine into this client's state: weights, pause and sleep."""
        if engine.info.weight_dtype != self.info.weight_dtype:
            old, new = (str(info.weight_dtype).removeprefix("torch.") for info in (self.info, engine.info))
            raise EngineError(
                f"the replacement of {self._name(index)} holds weights in {new} instead of {old}; start it with the "
                "same dtype"
            )
        if sends_weights and self._version is not None and self._sync is not None:
            if self._has_current_weights():
                await self._sync.send_to(self._name(index), engine, self._version)
            if not self._has_current_weights():  # an update began meanwhile
                self._sync.forget()
                await engine.pause()
                self._held.add(engine)
                return
        if self._is_paused:
            await engine.pause()
            if not self._is_paused:  # resumed meanwhile
                await engine.resume()
        if self._is_asleep:
            await engine.sleep()
            await engine.wake_up("weights")

    def _name(self, index: int) -> str:
        return "the engine" if len(self._engines) == 1 else f"engine {index + 1} of {len(self._engines)}"
