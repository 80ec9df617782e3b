"""The sampling loop of the engine."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from tx.tinker.backends.base import Sampler
from tx.tinker.db_models import EngineState, TxRequest
from tx.tinker.engine.passes import failed_outcome
from tx.tinker.engine.queue import RequestOutcome
from tx.tinker.engine.samplers import Samplers
from tx.tinker.submission.validation import check_job
from tx.tinker.types import SampleResult, UserError
from tx.tinker.wire import codec
from tx.tinker.wire.sample_job import SampleJob

MAX_RUNNING = 512
"""Maximum number of requests in the sampler. A single user gets half of them: see `Queue.next_samples`."""


class _RunningSample(NamedTuple):
    """A request in the sampler."""

    owner: str
    cancel: Callable[[], None]


class Sampling:
    """The sampling loop: hands sample requests to the sampler and collects their outcomes."""

    def __init__(
        self, sampler: Sampler, samplers: Samplers, limits: EngineState, max_running: int = MAX_RUNNING
    ) -> None:
        self._sampler = sampler
        self._samplers = samplers
        self._limits = limits
        self._max_running = max_running
        self._running: dict[int, _RunningSample] = {}
        self._outcomes: list[RequestOutcome] = []
        self.n_tokens = 0
        """Number of tokens sampled so far."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def n_free(self) -> int:
        """Number of requests that can start now."""
        return self._max_running - len(self._running)

    @property
    def running_by_owner(self) -> Counter[str]:
        """Number of running requests by user."""
        return Counter(running.owner for running in self._running.values())

    def begin(self, request: TxRequest) -> None:
        """Hand a request to the sampler."""
        request_id, limits = request.request_id, self._limits
        assert request_id is not None

        def done(result: SampleResult | Exception) -> None:
            if self._running.pop(request_id, None) is not None:  # otherwise it was cancelled
                self._outcomes.append(self._outcome(request, result))

        try:
            job = SampleJob.model_validate_json(request.payload)
            if job.weights.base_model != limits.base_model:
                theirs, ours = job.weights.base_model, limits.base_model
                raise UserError(f"the weights belong to base model {theirs}, but this server has {ours}")
            prompt, images = job.read_prompt(self._sampler.read_image, limits.max_context)
            check_job(job, prompt, limits)  # again: the server may have accepted it before it knew the model's limits
            sample_request = job.request(
                prompt, images, owner=request.owner, eos_ids=limits.eos_ids, max_context=limits.max_context
            )
            cancel = self._sampler.sample(sample_request, self._samplers.find(job.weights), done)
        except Exception as error:  # noqa: BLE001 (becomes the outcome of the request)
            self._outcomes.append(failed_outcome(request, error))
        else:
            self._running[request_id] = _RunningSample(request.owner, cancel)

    def _outcome(self, request: TxRequest, result: SampleResult | Exception) -> RequestOutcome:
        if isinstance(result, Exception):
            return failed_outcome(request, result)
        try:
            payload = codec.sample_bytes(result)
        except Exception as error:  # noqa: BLE001 (a sampler error fails only this request)
            return failed_outcome(request, error)
        self.n_tokens += sum(len(sample.tokens) for sample in result.samples)
        return RequestOutcome(request.request_id or 0, payload, is_protobuf=True)

    def cancel(self, request_id: int) -> bool:
        """Cancel a request. Return True if it was running."""
        running = self._running.pop(request_id, None)
        if running is not None:
            running.cancel()
        return running is not None

    def step(self) -> bool:
        """Sample a few tokens for the requests that fit. Return True if any request was running."""
        return self._sampler.step()

    def take_outcomes(self) -> list[RequestOutcome]:
        """Return the outcomes since the last call."""
        taken, self._outcomes = self._outcomes, []
        return taken
