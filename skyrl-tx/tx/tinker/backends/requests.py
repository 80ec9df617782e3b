"""State and scheduling of sample requests."""

import secrets
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from tx.tinker.types import Sample, SampleRequest, SampleResult, TopLogprobs

SAMPLES_PER_TURN = 4
"""Samples of a request that begin in one turn. They share their prompt and, on JAX, a block of lanes."""
MAX_OVERTAKING = 64
"""Maximum number of samples that may overtake a sample that does not fit."""
MAX_ATTEMPTS = 16
"""Maximum number of requests that are tried at once."""

MIN_TEMPERATURE = 1e-4
"""Minimum temperature of samples that are not greedy. Dividing logits by less would leave the range of float32."""

W = TypeVar("W")
"""Weights, in a backend-specific type."""


@dataclass(slots=True, eq=False)
class RequestState(Generic[W]):
    """A sample request in progress."""

    spec: SampleRequest
    weights: W
    done: Callable[[SampleResult], None]
    seed: int = field(init=False)
    n_begun: int = 0
    round: int = 0  # of its turn: each owner has one turn per round
    n_overtaken: int = 0  # samples that overtook its next sample
    is_cancelled: bool = False
    _samples: dict[int, Sample] = field(default_factory=dict)  # finished samples by their numbers
    _prompt_logprobs: np.ndarray | None = None
    _top_prompt: TopLogprobs | None = None

    def __post_init__(self) -> None:
        seed = self.spec.params.seed
        self.seed = secrets.randbits(62) if seed is None else seed

    @property
    def temperature(self) -> float:
        """Temperature of its samples. 0 is greedy."""
        temperature = self.spec.params.temperature
        return max(temperature, MIN_TEMPERATURE) if temperature > 0 else 0.0

    @property
    def n_prefilled(self) -> int:
        """Number of prefilled prompt tokens: all but the last."""
        return len(self.spec.prompt) - 1

    @property
    def n_left(self) -> int:
        """Number of samples that have not started."""
        return self.spec.n_samples - self.n_begun

    @property
    def n_running(self) -> int:
        """Number of running samples."""
        return self.n_begun - len(self._samples)

    @property
    def needs_logprobs(self) -> bool:
        """True if prompt log-probs were requested and are not known yet."""
        return self.n_begun == 0 and (self.spec.wants_prompt_logprobs or self.spec.n_top_prompt > 0)

    def record_prompt(self, found: Sequence[tuple[np.ndarray, ...]]) -> None:
        """Record the log-probs (n,) of the prompt after its first token, and the top tokens with log-probs (n, k)."""
        n_prompt, k = len(self.spec.prompt), self.spec.n_top_prompt
        logprobs = np.full(n_prompt, np.nan, np.float32)
        top_tokens, top = np.zeros((n_prompt, k), np.int32), np.full((n_prompt, k), np.nan, np.float32)
        if found:
            chosen, best_tokens, best = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            top_tokens, top = top_tokens[:, : best.shape[1]], top[:, : best.shape[1]]  # the vocabulary may be smaller
            logprobs[1:], top_tokens[1:], top[1:] = chosen, best_tokens[:, :k], best[:, :k]
        self._prompt_logprobs = logprobs if self.spec.wants_prompt_logprobs else None
        self._top_prompt = TopLogprobs(top_tokens, top) if k else None

    def end(self, number: int, sample: Sample) -> None:
        """Record a finished sample. The last one completes the request."""
        self._samples[number] = sample
        if len(self._samples) == self.spec.n_samples and not self.is_cancelled:
            samples = [self._samples[i] for i in range(self.spec.n_samples)]
            self.done(SampleResult(samples, self._prompt_logprobs, self._top_prompt))


R = TypeVar("R", bound=RequestState[Any])


class TurnQueue(Generic[R]):
    """A round-robin queue of samples to start, so that no request waits behind thousands of another request's samples.

    Owners take turns, as do an owner's requests: every owner has one turn per round, and a turn starts up to
    `SAMPLES_PER_TURN` samples. A sample that does not fit into the cache may be overtaken by samples that do, but at
    most `MAX_OVERTAKING` times. Then everything waits until it fits, so a long sample is never starved by short ones.

    Example: alice queues a1 (10 samples) and a2 (2 samples), then bob queues b1 (4 samples). Rounds: a1 is in round 0,
    a2 in round 1, b1 in round 0. The samples start in the order 4 of a1, 4 of b1, 2 of a2, 4 of a1, 2 of a1: bob did
    not wait for all of alice's 12 samples.
    """

    def __init__(self) -> None:
        self._requests: list[R] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[R]:
        return reversed(self._requests)

    def add(self, request: R) -> Callable[[], None]:
        """Queue a request after its owner's other requests. Return a function that cancels it."""
        self._put(request)
        return lambda: setattr(request, "is_cancelled", True)

    def take_cancelled(self) -> list[R]:
        """Remove and return cancelled requests."""
        cancelled = [request for request in self._requests if request.is_cancelled]
        if cancelled:
            self._requests = [request for request in self._requests if not request.is_cancelled]
            self._close_gaps()
        return cancelled

    def begin(self, begin: Callable[[R], bool]) -> None:
        """Begin as many samples as fit. `begin` tries a request's next sample."""
        n_refused = 0
        while n_refused < min(len(self._requests), MAX_ATTEMPTS):
            if any(waiting.n_overtaken >= MAX_OVERTAKING for waiting in self._requests[:n_refused]):
                break
            request = self._requests[n_refused]
            if not begin(request):
                n_refused += 1
                continue
            for overtaken in self._requests[:n_refused]:
                overtaken.n_overtaken += 1
            request.n_overtaken = 0
            if request.n_left and request.n_begun % SAMPLES_PER_TURN:
                continue
            del self._requests[n_refused]
            if request.n_left:
                request.round += 1
                self._put(request)

    def _close_gaps(self) -> None:
        """Move rounds together, so that every owner has a request in each round up to its last."""
        n_by_owner: Counter[str] = Counter()
        first = self._requests[0].round if self._requests else 0
        for request in self._requests:
            request.round = first + n_by_owner[request.spec.owner]
            n_by_owner[request.spec.owner] += 1
        self._requests.sort(key=lambda request: request.round)

    def _put(self, request: R) -> None:
        """Insert a request: not before the first of all, and one round after its owner's last."""
        first = self._requests[0].round if self._requests else 0
        next_rounds = (other.round + 1 for other in self._requests if other.spec.owner == request.spec.owner)
        request.round = max(request.round, first, *next_rounds)
        insort(self._requests, request, key=lambda other: other.round)
