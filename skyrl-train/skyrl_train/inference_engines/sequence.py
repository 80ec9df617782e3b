"""A request that is being served."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from skyrl_train.inference_engines.base import (
    EngineRequest,
    EngineResult,
    SamplingParams,
    StopReason,
    TokenChunk,
)
from skyrl_train.inference_engines.sampling import Choice
from skyrl_train.types import WeightSpan


@dataclass(slots=True)
class Call:
    """One `generate` or `stream` call: its results as they come in, and the future that waits for the last."""

    results: list[EngineResult | None]
    n_left: int
    done: asyncio.Future[None]
    chunks: asyncio.Queue[TokenChunk | None] | None = None  # of a stream; None ends it

    @staticmethod
    def of(n_requests: int, *, is_stream: bool = False) -> Call:
        """Return a call of the running event loop."""
        done = asyncio.get_running_loop().create_future()
        call = Call([None] * n_requests, n_requests, done, asyncio.Queue() if is_stream else None)
        if call.chunks is not None:
            done.add_done_callback(lambda _, chunks=call.chunks: chunks.put_nowait(None))  # type: ignore[misc]
        return call

    def deliver(self, index: int, result: EngineResult) -> None:
        """Take the result of one request; the last one wakes the caller."""
        self.results[index] = result
        self.n_left -= 1
        if self.n_left == 0 and not self.done.done():
            self.done.set_result(None)

    def all_results(self) -> list[EngineResult]:
        """Return the results of a call that is done."""
        assert self.n_left == 0
        return [result for result in self.results if result is not None]


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A request on its way: n tokens of response so far."""

    request: EngineRequest
    call: Call
    index: int  # of the request in its call
    max_tokens: int  # of prompt and response
    token_ids: list[int]  # prompt and response
    n_reused: int | None = None  # tokens of the prompt that were stored when its turn came first
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    is_shaped: bool = False  # a token was sampled from another distribution than the model's
    raw_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    n_streamed: int = 0  # tokens that were put into the call's stream
    stop_reason: StopReason | None = None

    @property
    def sampling(self) -> SamplingParams:
        """How to sample it."""
        return self.request.sampling

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def is_over(self) -> bool:
        """Complete, or nobody waits for it any more."""
        return self.stop_reason is not None or self.call.done.done()

    def append(self, choice: Choice, weight_version: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(choice.token_id)
        self.logprobs.append(choice.logprob)
        self.is_shaped = self.is_shaped or choice.sampling_logprob is not None
        self.sampling_logprobs.append(choice.logprob if choice.sampling_logprob is None else choice.sampling_logprob)
        for values, value in (
            (self.raw_logprobs, choice.raw_logprob),
            (self.top_logprobs, choice.top_logprobs),
        ):
            if value is not None:
                values.append(value)  # type: ignore[arg-type]
        n_before = 0
        if self.weight_spans and self.weight_spans[-1].version == weight_version:
            n_before = self.weight_spans.pop().n_tokens
        self.weight_spans.append(WeightSpan(weight_version, n_before + 1))

    def put_chunk(self, result: EngineResult | None = None) -> None:
        """Put new tokens into the stream of the call, if it is one; the last time with the result."""
        if self.call.chunks is None or (self.n_streamed == len(self.logprobs) and result is None):
            return
        n_before, self.n_streamed = self.n_streamed, len(self.logprobs)
        token_ids = self.token_ids[self.n_prompt + n_before :]
        self.call.chunks.put_nowait(TokenChunk(token_ids, self.logprobs[n_before:], result))

    def result(self) -> EngineResult:
        """What the caller gets."""
        assert self.stop_reason is not None
        return EngineResult(
            token_ids=self.token_ids[self.n_prompt :],
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            weight_spans=tuple(self.weight_spans),
            sampling_logprobs=self.sampling_logprobs if self.is_shaped else None,
            raw_logprobs=self.raw_logprobs or None,
            top_logprobs=self.top_logprobs or None,
            n_reused=self.n_reused or 0,
        )
