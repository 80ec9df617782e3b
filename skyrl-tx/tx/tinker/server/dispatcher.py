"""Sampling on an external server. A thread of the API server sends the samples, so training never delays them."""

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
"""Polling interval. Other servers that share the database cannot wake this one."""
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
        self._wakeup = threading.Event()
        self._stopping = False
        self._sampling: Sampling | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Counters for the status page and the metrics."""
        sampling = self._sampling
        return {} if sampling is None else {"tokens_sampled": sampling.n_tokens, "sampling": len(sampling)}

    def wake(self) -> None:
        """Signal that there may be new or cancelled samples."""
        self._wakeup.set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Dispatch within the block."""
        thread = threading.Thread(target=self._run, name="tx-dispatch")
        thread.start()
        try:
            yield
        finally:
            self._stopping = True
            self.wake()
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while not self._stopping:
            try:
                with StateLock(self._config, "dispatcher") as lock:
                    lock.take()
                    self._dispatch(lock)
            except StateTakenError:
                self._wakeup.wait(RETRY_SEC)  # another server holds the lock
            except Exception:
                logger.exception("dispatching failed; retrying")
                self._wakeup.wait(RETRY_SEC)

    def _dispatch(self, lock: StateLock) -> None:
        """Dispatch samples until the server stops or the lock is lost.

        Unfinished requests stay pending, so the next dispatcher resumes them.
        """
        config = self._config
        while (state := self._read_state()) is None:  # no engine has reported the base model's limits yet
            if self._stopping:
                return
            self._wakeup.wait(POLL_SEC)
        folder = config.external_inference_lora_base or config.checkpoints_base / "external"
        key = config.external_inference_api_key.get_secret_value()
        with contextlib.closing(VllmSampler(self._url, key, folder, config.external_inference_answer_sec)) as sampler:
            samplers = Samplers(config, sampler)
            # A single user may run half of the requests (see `Queue.next_samples`), which fills all connections.
            self._sampling = sampling = Sampling(sampler, samplers, state, max_running=2 * MAX_CONNECTIONS)
            queue = Queue(self._database, config.model_name, kinds=(Kind.SAMPLE,), counts_tries=False)
            fetched_at = -math.inf
            while not self._stopping and lock.is_held():
                if self._wakeup.is_set() or time.monotonic() - fetched_at > POLL_SEC:
                    self._wakeup.clear()  # before the fetch, so that a request that just misses it causes another
                    fetched_at = time.monotonic()
                    queue.fetch()
                    samplers.evict_deleted()
                if not self._step(queue, sampling):
                    self._wakeup.wait(POLL_SEC)

    def _step(self, queue: Queue, sampling: Sampling) -> bool:
        """Start queued samples and store finished ones. Return False if there was nothing to do."""
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
