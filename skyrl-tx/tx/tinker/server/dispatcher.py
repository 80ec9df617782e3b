"""Sampling on an external server. A thread beside the API sends the samples, so that training never delays them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping

from sqlalchemy import Engine as Database

from tx.tinker.backends.vllm import MAX_CONNECTIONS, VllmSampler
from tx.tinker.config import TxConfig
from tx.tinker.db_models import EngineState, Kind
from tx.tinker.engine.queue import Queue
from tx.tinker.engine.samplers import Samplers
from tx.tinker.engine.sampling import Sampling
from tx.tinker.store import queries
from tx.tinker.store.database import reading
from tx.tinker.store.state_lock import StateLock, StateTakenError

logger = logging.getLogger(__name__)

POLL_SEC = 0.5
"""Seconds between fetches without a ring: other servers on the database do not ring."""
RETRY_SEC = 2.0


class SampleDispatcher:
    """The link to the external server: takes samples from the database, sends them, and writes the results back.

    If several servers share a database, only one dispatches. The base model's state comes from the engine.
    """

    def __init__(self, config: TxConfig, url: str, database: Database, on_results: Callable[[], None]) -> None:
        self._config = config
        self._url = url
        self._database = database
        self._on_results = on_results
        self._rung = threading.Event()
        self._is_ending = False
        self._sampling: Sampling | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters for the status page and the metrics."""
        sampling = self._sampling
        return {} if sampling is None else {"tokens_sampled": sampling.n_tokens, "sampling": len(sampling)}

    def ring(self) -> None:
        """Signal that there may be new or cancelled samples."""
        self._rung.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Dispatch within the block."""
        thread = threading.Thread(target=self._run, name="tx-dispatch")
        thread.start()
        try:
            yield
        finally:
            self._is_ending = True
            self.ring()
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while not self._is_ending:
            try:
                with StateLock(self._config, "dispatcher") as lock:
                    lock.take()
                    self._dispatch(lock)
            except StateTakenError:
                self._rung.wait(RETRY_SEC)  # a different server dispatches
            except Exception:
                logger.exception("samples cannot be dispatched; retrying")
                self._rung.wait(RETRY_SEC)

    def _dispatch(self, lock: StateLock) -> None:
        """Dispatch until the server stops. Unanswered requests stay pending in the database."""
        config = self._config
        while (state := self._read_state()) is None:
            if self._is_ending:
                return
            self._rung.wait(POLL_SEC)
        folder = config.external_inference_lora_base or config.checkpoints_base / "external"
        key = config.external_inference_api_key.get_secret_value()
        with contextlib.closing(VllmSampler(self._url, key, folder, config.external_inference_answer_sec)) as sampler:
            samplers = Samplers(config, sampler)
            self._sampling = sampling = Sampling(sampler, samplers, state, max_running=2 * MAX_CONNECTIONS)
            queue = Queue(self._database, config.model_name, kinds=(Kind.SAMPLE,), counts_tries=False)
            fetched_at = -math.inf
            while not self._is_ending and lock.is_held():
                if self._rung.is_set() or time.monotonic() - fetched_at > POLL_SEC:
                    self._rung.clear()
                    fetched_at = time.monotonic()
                    queue.fetch()
                    samplers.evict_deleted()
                if not self._work(queue, sampling):
                    self._rung.wait(POLL_SEC)

    def _work(self, queue: Queue, sampling: Sampling) -> bool:
        """Begin new samples and write results. Return True if there were any."""
        for request_id in queue.find_cancelled():
            if sampling.cancel(request_id):
                queue.drop(request_id)
        begun = queue.begin(queue.next_samples(sampling.n_free, sampling.running_by_owner))
        for request in begun:
            sampling.begin(request)
        is_sampling = sampling.step()
        if outcomes := sampling.take_outcomes():
            queue.finish(outcomes)
            self._on_results()
        return bool(begun or is_sampling or outcomes)

    def _read_state(self) -> EngineState | None:
        with reading(self._database) as db:
            return queries.engine_state(db, self._config.model_name)
