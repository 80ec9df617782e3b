"""One agent's dealings with the model: how it is sampled, and what was said."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from skyrl_train.generators.base import seed_of
from skyrl_train.generators.endpoint.recorder import Prompt, Recording
from skyrl_train.generators.endpoint.wire import CompletionOptions
from skyrl_train.inference_engines.base import MIN_TEMPERATURE, EngineRequest, EngineResult, SamplingParams

logger = logging.getLogger(__name__)

OF_THE_SESSION: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "min_tokens": "min_new_tokens",
    "ignore_eos": "ignore_eos",
}
"""Fields of a request that a session decides, and their names in `SamplingParams`: they shape the distribution that the
trainer believes replies to come from."""


def free_sampling(asked: CompletionOptions, max_new_tokens: int) -> SamplingParams:
    """Return the sampling of a request without a session, of at most `max_new_tokens` tokens."""
    set_here = {name: value for field, name in OF_THE_SESSION.items() if (value := getattr(asked, field)) is not None}
    temperature = set_here.get("temperature", 1.0)
    return SamplingParams(
        **set_here | {"temperature": temperature if temperature >= MIN_TEMPERATURE else 0.0},
        max_new_tokens=min(asked.max_new_tokens or max_new_tokens, max_new_tokens),
        stop=asked.stops,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        n_top_logprobs=asked.n_top_logprobs or 0,
    )


@dataclass(slots=True, eq=False)
class Session:
    """An agent's requests, from `open_session` to `end_session`.

    A request may stop earlier than the session's sampling says, and changes nothing else about it. Its randomness
    follows from the session's seed, its prompt, and how often the same prompt was asked before.
    """

    id: str
    sampling: SamplingParams
    seed: int
    recording: Recording
    generate_s: float = 0.0  # seconds that requests took, one after the other
    engine_failure: str | None = None  # since the last reply, the first
    caches: set[str] = field(default_factory=set)  # the engine's sessions: one a row, so that none evicts another
    _seeds: set[int] = field(default_factory=set)  # of requests so far
    _cache_of_row: dict[int, str] = field(default_factory=dict)

    def sampling_for(self, asked: CompletionOptions, warned: set[str]) -> SamplingParams:
        """The session's sampling, cut shorter where the request says so. Names in `warned` need no other warning."""
        for field_name, name in OF_THE_SESSION.items():
            self._warn(field_name, getattr(asked, field_name), getattr(self.sampling, name), warned)
        self._warn("seed", asked.seed, None, warned)
        max_new_tokens = self.sampling.max_new_tokens
        return replace(
            self.sampling,
            max_new_tokens=min(asked.max_new_tokens or max_new_tokens, max_new_tokens),
            stop=tuple(dict.fromkeys((*self.sampling.stop, *asked.stops))),
            stop_token_ids=tuple(dict.fromkeys((*self.sampling.stop_token_ids, *(asked.stop_token_ids or ())))),
            n_top_logprobs=asked.n_top_logprobs or 0,
        )

    def engine_request(self, prompt: Prompt, sampling: SamplingParams) -> EngineRequest:
        """The request for one reply to `prompt`, to be recorded or given up; no two have the same randomness."""
        digest = blake2b(array("q", prompt.token_ids), digest_size=16).hexdigest()
        n_before = 0
        while (seed := seed_of(f"{self.seed}/{n_before}/{digest}")) in self._seeds:
            n_before += 1
        self._seeds.add(seed)
        return EngineRequest(prompt.token_ids, sampling, seed, self._cache_for(prompt, n_before))

    def record(self, prompt: Prompt, request: EngineRequest, result: EngineResult, reply: str) -> None:
        """Take down a reply, whose text the agent knows as `reply`."""
        self.engine_failure = None
        row = self.recording.add(prompt, result, reply)
        assert request.session_id is not None
        self._cache_of_row.setdefault(row, request.session_id)

    def give_up(self, request: EngineRequest) -> None:
        """Nobody got an answer: asked again, the request is the same."""
        self._seeds.discard(request.seed)

    def _cache_for(self, prompt: Prompt, n_before: int) -> str:
        if prompt.origin is not None and n_before == 0 and self.recording.goes_on(prompt):
            return self._cache_of_row[prompt.origin.row]
        cache = f"{self.id}/{len(self.caches)}"
        self.caches.add(cache)
        return cache

    def _warn(self, name: str, asked: object, decided: object, warned: set[str]) -> None:
        if asked is None or asked == decided or name in warned:
            return
        warned.add(name)
        logger.warning(
            "Requests ask for %s=%s. While they are recorded for training, %s; such values are ignored",
            *(name, asked, "randomness is the trainer's" if decided is None else f"{name} is {decided}"),
        )


Owners = frozenset[Session | None]
"""Sessions that a request belongs to; None stands for no session."""
