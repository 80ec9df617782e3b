"""An agent's session: the sampling parameters, seeds and caches of its requests, and their recording."""

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from skyrl_agent.endpoint.recorder import Digest, Prompt, Recording
from skyrl_agent.endpoint.replies import Reply
from skyrl_agent.endpoint.wire import CompletionOptions
from skyrl_train.inference_engines.base import MIN_TEMPERATURE, EngineRequest, EngineResult, SamplingParams, hash_seed

logger = logging.getLogger(__name__)

MAX_REPEATABLE = 64  # latest requests of a session whose replies can be sent again

DISTRIBUTION_FIELDS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "ignore_eos")},
    "min_tokens": "min_new_tokens",
}
"""Request fields that shape the sampling distribution, and their names in `SamplingParams`. In a session, they are
ignored in favor of the configuration, because the trainer computes log-probs under the configured distribution."""


def free_sampling(request: CompletionOptions, max_new_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a request without a session, limited to `max_new_tokens` tokens."""
    values = {name: getattr(request, field) for field, name in DISTRIBUTION_FIELDS.items()}
    chosen = {name: value for name, value in values.items() if value is not None}
    if chosen.get("temperature", 1.0) < MIN_TEMPERATURE:
        chosen["temperature"] = 0.0
    return _limit(SamplingParams(max_new_tokens, **chosen), request)


def _limit(sampling: SamplingParams, request: CompletionOptions) -> SamplingParams:
    """Apply a request's limits to `sampling`. They can only make the reply shorter."""
    return replace(
        sampling,
        max_new_tokens=min(request.max_new_tokens or sampling.max_new_tokens, sampling.max_new_tokens),
        stop=tuple(dict.fromkeys((*sampling.stop, *request.stops))),
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *(request.stop_token_ids or ())))),
        n_top_logprobs=request.n_top_logprobs or 0,
    )


RequestKey = tuple[Digest | None, SamplingParams]  # equal for a request and its retry


@dataclass(frozen=True, slots=True)
class Sampled:
    """A request to the engine and its result."""

    request: EngineRequest
    result: EngineResult
    is_recorded: bool = False


@dataclass(slots=True, eq=False)
class AgentSession:
    """An agent's requests, from `open_session` to `end_session`.

    A request's seed is a function of the session's seed, the prompt, and the number of earlier requests with the same
    prompt.
    """

    id: str
    sampling: SamplingParams
    seed: int
    recording: Recording
    generate_s: float = 0.0  # sum over requests
    engine_failure: str | None = None  # the first failure since the last reply
    counts: Counter[str] = field(default_factory=Counter)
    """Replies to requests with tools ("with_tools"), replies with calls ("with_calls") and with malformed calls
    ("malformed"), and retried requests that got a recorded reply ("repeated")."""
    caches: set[str] = field(default_factory=set)  # session ids of the engine, one per row
    _seeds: set[int] = field(default_factory=set)  # of requests so far
    _cache_of_row: dict[int, str] = field(default_factory=dict)
    _replies: dict[RequestKey, list[Sampled]] = field(default_factory=dict)
    _in_progress: dict[RequestKey, set[asyncio.Future[None]]] = field(default_factory=dict)

    def sampling_for(self, request: CompletionOptions, warned: set[str]) -> SamplingParams:
        """Return the sampling parameters of a reply. Warn about each ignored field that is not in `warned` yet."""
        ignored = {name: getattr(self.sampling, own) for name, own in DISTRIBUTION_FIELDS.items()} | {"seed": None}
        for name, configured in ignored.items():
            requested = getattr(request, name)
            if requested is not None and requested != configured and name not in warned:
                warned.add(name)
                reason = "the trainer chooses the seeds" if configured is None else f"{name} is {configured}"
                logger.warning(
                    "Requests set %s=%s, which is ignored while they are recorded for training: %s",
                    *(name, requested, reason),
                )
        return _limit(self.sampling, request)

    def engine_request(self, prompt: Prompt, sampling: SamplingParams) -> EngineRequest:
        """Create a request with a unique seed. Pass it to `record` or `give_up` afterwards."""
        hashed = blake2b(array("q", prompt.token_ids), digest_size=16)
        for span in prompt.images:
            hashed.update(span.image.digest.encode())
        digest = hashed.hexdigest()
        n_earlier = 0
        while (seed := hash_seed(f"{self.seed}/{n_earlier}/{digest}")) in self._seeds:
            n_earlier += 1
        self._seeds.add(seed)
        if prompt.origin is not None and n_earlier == 0 and self.recording.extends_row(prompt):
            cache = self._cache_of_row[prompt.origin.row]
        else:
            cache = f"{self.id}/{len(self.caches)}"
            self.caches.add(cache)
        return EngineRequest(prompt.token_ids, sampling, seed, cache, prompt.images)

    def record(self, prompt: Prompt, sampled: Sampled, reply: Reply) -> None:
        """Record a reply. `reply` is its form as sent to the agent."""
        self.engine_failure = None
        row = self.recording.record(prompt, sampled.result, reply)
        assert sampled.request.session_id is not None
        self._cache_of_row.setdefault(row, sampled.request.session_id)
        self.counts.update(
            with_tools=int(prompt.tools is not None),
            with_calls=int(bool(reply.calls)),
            malformed=int(reply.is_malformed),
        )
        if prompt.digest is not None:
            # Without the prompt and the experts, which take much memory.
            kept = Sampled(replace(sampled.request, prompt_ids=[]), replace(sampled.result, experts=None), True)
            self._replies.setdefault((prompt.digest, sampled.request.sampling), []).append(kept)
            if len(self._replies) > MAX_REPEATABLE:
                del self._replies[next(iter(self._replies))]

    @asynccontextmanager
    async def in_progress(
        self, prompt: Prompt, sampling: SamplingParams, n_repeated: int
    ) -> AsyncIterator[list[Sampled] | None]:
        """Mark a request as in progress, and yield the last `n_repeated` replies to an equal request, if there are any.

        A client that has lost the replies repeats the request. If the first request is still in progress, wait for it:
        its replies would otherwise be recorded twice.
        """
        key = prompt.digest, sampling
        others, own = self._in_progress.setdefault(key, set()), asyncio.get_running_loop().create_future()
        while n_repeated and others:
            await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
        others.add(own)
        try:
            replies = self._replies.get(key, [])
            is_repeated = 0 < n_repeated <= len(replies)
            if is_repeated:
                self.counts["repeated"] += 1
            yield replies[-n_repeated:] if is_repeated else None
        finally:
            others.discard(own)
            own.set_result(None)

    def give_up(self, request: EngineRequest) -> None:
        """Release the seed of a failed request, so that a retry samples the same tokens."""
        self._seeds.discard(request.seed)


Owners = frozenset[AgentSession | None]  # the sessions of a request, None for a choice without a session
