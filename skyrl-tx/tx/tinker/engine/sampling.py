"""Samples on their way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tx.tinker.backends.base import Sampler
from tx.tinker.db_models import EngineState, Request
from tx.tinker.engine.passes import failed
from tx.tinker.engine.queue import Outcome
from tx.tinker.engine.samplers import Samplers
from tx.tinker.sample_validation import check_job
from tx.tinker.types import SampleResult, UserError
from tx.tinker.wire import codec
from tx.tinker.wire.sample_job import SampleJob

MOST_AT_ONCE = 512
"""Requests that a sampler in this process has. A user alone has half of them, see `Queue.next_samples`."""


class _Running(NamedTuple):
    """A request that the sampler knows of."""

    owner: str
    cancel: Callable[[], None]


class Sampling:
    """Those that the sampler knows of."""

    def __init__(
        self, sampler: Sampler, samplers: Samplers, limits: EngineState, most_at_once: int = MOST_AT_ONCE
    ) -> None:
        self._sampler = sampler
        self._samplers = samplers
        self._limits = limits
        self._most_at_once = most_at_once
        self._running: dict[int, _Running] = {}
        self._outcomes: list[Outcome] = []
        self.n_tokens = 0
        """Sampled so far."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def n_free(self) -> int:
        """How many more may begin."""
        return self._most_at_once - len(self._running)

    @property
    def running_by_owner(self) -> Counter[str]:
        """How many have begun."""
        return Counter(one.owner for one in self._running.values())

    def begin(self, request: Request) -> None:
        """Hand it to the sampler."""
        assert request.request_id is not None
        try:
            self._begin(request, request.request_id)
        except Exception as error:  # noqa: BLE001 (it is what came of the request)
            self._outcomes.append(failed(request, error))

    def _begin(self, request: Request, request_id: int) -> None:
        job = SampleJob.model_validate_json(request.payload)
        if job.weights.base_model != self._limits.base_model:
            raise UserError(
                f"the weights are of {job.weights.base_model}, and this server has {self._limits.base_model}"
            )
        check_job(job, self._limits)  # again: the server may not have known the model's limits

        def done(result: SampleResult | Exception) -> None:
            if self._running.pop(request_id, None) is not None:  # else it is not wanted any more
                self._outcomes.append(self._outcome(request, result))

        limits = self._limits
        asked = job.request(owner=request.owner, eos_ids=limits.eos_ids, max_context=limits.max_context)
        cancel = self._sampler.sample(asked, self._samplers.find(job.weights), done)
        self._running[request_id] = _Running(request.owner, cancel)

    def _outcome(self, request: Request, result: SampleResult | Exception) -> Outcome:
        if isinstance(result, Exception):
            return failed(request, result)
        try:
            told = codec.sample_bytes(result)
        except Exception as error:  # noqa: BLE001 (a mistake of the sampler costs this request, and not the engine)
            return failed(request, error)
        self.n_tokens += sum(len(one.tokens) for one in result.samples)
        return Outcome(request.request_id or 0, told, is_protobuf=True)

    def cancel(self, request_id: int) -> bool:
        """Let go of a request; whether it was under way."""
        running = self._running.pop(request_id, None)
        if running is not None:
            running.cancel()
        return running is not None

    def step(self) -> bool:
        """Choose a few tokens of every sample; whether there was any."""
        return self._sampler.step()

    def take_outcomes(self) -> list[Outcome]:
        """Those since the last time."""
        taken, self._outcomes = self._outcomes, []
        return taken
