"""What a sampler knows of its requests, and whose sample begins next; the same for every backend."""

from __future__ import annotations

import secrets
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from tx.tinker.types import Sample, SampleRequest, SampleResult, TopLogprobs

TURN = 4
"""So many samples of a request begin before one of another: they share their prompt, and on JAX a block of lanes."""
MOST_PASSED = 64
"""So many samples of others may begin before one for which there is no room."""
MOST_REFUSED = 16
"""So many requests are tried at a time."""

W = TypeVar("W")
"""Weights, of a kind that only the backend knows."""


@dataclass(slots=True, eq=False)
class Ongoing(Generic[W]):
    """A request on its way."""

    ask: SampleRequest
    weights: W
    done: Callable[[SampleResult], None]
    seed: int = field(init=False)
    n_begun: int = 0
    round: int = 0  # when its turn is: there is one for each owner in a round
    n_passed: int = 0  # samples of others that began before its next one, although it was its turn
    is_cancelled: bool = False
    _samples: dict[int, Sample] = field(default_factory=dict)  # those that are done, by their numbers
    _prompt_logprobs: np.ndarray | None = None
    _top_prompt: TopLogprobs | None = None

    def __post_init__(self) -> None:
        seed = self.ask.params.seed
        self.seed = secrets.randbits(62) if seed is None else seed

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that are read before any is chosen: all but the last."""
        return len(self.ask.prompt) - 1

    @property
    def n_left(self) -> int:
        """Samples that have not begun."""
        return self.ask.n_samples - self.n_begun

    @property
    def n_running(self) -> int:
        """Samples that have begun, and are not done."""
        return self.n_begun - len(self._samples)

    @property
    def needs_logprobs(self) -> bool:
        """Whether the prompt's are asked for, and not known yet."""
        return self.n_begun == 0 and (self.ask.wants_prompt_logprobs or self.ask.n_top_prompt > 0)

    def note_prompt(self, found: Sequence[tuple[np.ndarray, ...]]) -> None:
        """Take log-probs (n,) of the prompt from its second token on, and the likeliest tokens with theirs (n, k)."""
        n_prompt, k = len(self.ask.prompt), self.ask.n_top_prompt
        logprobs = np.full(n_prompt, np.nan, np.float32)
        top_tokens, top = np.zeros((n_prompt, k), np.int32), np.full((n_prompt, k), np.nan, np.float32)
        if found:
            chosen, best_tokens, best = (np.concatenate(one) for one in zip(*found, strict=True))
            logprobs[1:], top_tokens[1:], top[1:] = chosen, best_tokens[:, :k], best[:, :k]
        self._prompt_logprobs = logprobs if self.ask.wants_prompt_logprobs else None
        self._top_prompt = TopLogprobs(top_tokens, top) if k else None

    def end(self, number: int, sample: Sample) -> None:
        """Take a sample that is done. With the last one, the request is."""
        self._samples[number] = sample
        if len(self._samples) == self.ask.n_samples and not self.is_cancelled:
            samples = [self._samples[i] for i in range(self.ask.n_samples)]
            self.done(SampleResult(samples, self._prompt_logprobs, self._top_prompt))


R = TypeVar("R", bound=Ongoing[Any])


class Turns(Generic[R]):
    """Requests whose samples have not all begun: a few of each in its turn, so that one does not wait for thousands.

    Owners take turns, and the requests of each: in a round, every owner has one turn. Where there is no room for a
    sample, those of others go first, but no more than `MOST_PASSED` of them: then all wait for it, so that everybody's
    turn comes.
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
        """Take a request, the last one of its owner's; returns what cancels it."""
        self._put(request)
        return lambda: setattr(request, "is_cancelled", True)

    def take_cancelled(self) -> list[R]:
        """Those that were cancelled, which are no longer here."""
        cancelled = [one for one in self._requests if one.is_cancelled]
        if cancelled:
            self._requests = [one for one in self._requests if not one.is_cancelled]
            self._close_gaps()
        return cancelled

    def begin(self, begin: Callable[[R], bool]) -> None:
        """Let as many samples begin as there is room for; `begin` tries it with the next one of a request."""
        n_refused = 0
        while n_refused < min(len(self._requests), MOST_REFUSED):
            if any(one.n_passed >= MOST_PASSED for one in self._requests[:n_refused]):
                break
            request = self._requests[n_refused]
            if not begin(request):
                n_refused += 1
                continue
            for passed in self._requests[:n_refused]:
                passed.n_passed += 1
            request.n_passed = 0
            if request.n_left and request.n_begun % TURN:
                continue
            del self._requests[n_refused]
            if request.n_left:
                request.round += 1
                self._put(request)

    def _close_gaps(self) -> None:
        """Owners are in every round, from the first one on, until they have no more requests."""
        n_seen: Counter[str] = Counter()
        first = self._requests[0].round if self._requests else 0
        for one in self._requests:
            one.round = first + n_seen[one.ask.owner]
            n_seen[one.ask.owner] += 1
        self._requests.sort(key=lambda one: one.round)

    def _put(self, request: R) -> None:
        """Where its turn is: not before the first of all, and in the round after its owner's last."""
        first = self._requests[0].round if self._requests else 0
        theirs = (one.round + 1 for one in self._requests if one.ask.owner == request.ask.owner)
        request.round = max(request.round, first, *theirs)
        insort(self._requests, request, key=lambda one: one.round)
