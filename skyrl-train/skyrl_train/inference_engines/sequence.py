"""State of a request in progress, and the rules that end its response."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import EngineRequest, EngineResult, SamplingParams, TokenChunk
from skyrl_train.inference_engines.sampling import SampledToken
from skyrl_train.types import StopReason, WeightSpan

S = TypeVar("S", bound="ActiveSequence")


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A request in progress, with the tokens sampled so far."""

    request: EngineRequest
    max_tokens: int  # prompt and response together
    done: asyncio.Future[EngineResult] | None = None  # None: no task waits for the result
    chunks: asyncio.Queue[TokenChunk | None] | None = None  # for a stream, ended by None
    token_ids: list[int] = field(init=False)  # prompt and response
    n_reused: int | None = None  # prompt tokens found in the cache when the sequence was first admitted
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    is_shaped: bool = False  # penalties or truncation changed the distribution of a token
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    weight_spans: list[WeightSpan] = field(default_factory=list)
    n_streamed: int = 0  # tokens already in `chunks`
    n_received: int = 0  # tokens received from the backend since the request was last submitted
    stop_reason: StopReason | None = None
    experts: np.ndarray | None = None  # as in `EngineResult`

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_ids)

    @property
    def sampling(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def is_over(self) -> bool:
        """True if the response is complete or its caller has left."""
        return self.stop_reason is not None or (self.done is not None and self.done.done())

    def append(self, choice: SampledToken, weight_version: int) -> None:
        """Add a sampled token."""
        self.token_ids.append(choice.token_id)
        self.logprobs.append(choice.logprob)
        self.is_shaped = self.is_shaped or choice.sampling_logprob is not None
        self.sampling_logprobs.append(choice.logprob if choice.sampling_logprob is None else choice.sampling_logprob)
        if choice.top_logprobs is not None:
            self.top_logprobs.append(choice.top_logprobs)
        n_before = 0
        if self.weight_spans and self.weight_spans[-1].version == weight_version:
            n_before = self.weight_spans.pop().n_tokens
        self.weight_spans.append(WeightSpan(weight_version, n_before + 1))

    def put_chunk(self, result: EngineResult | None = None) -> None:
        """Put new tokens into the stream, if any. The last chunk has the result."""
        if self.chunks is None or (self.n_streamed == len(self.logprobs) and result is None):
            return
        n_before, self.n_streamed = self.n_streamed, len(self.logprobs)
        token_ids = self.token_ids[self.n_prompt + n_before :]
        self.chunks.put_nowait(TokenChunk(token_ids, self.logprobs[n_before:], result))

    def result(self) -> EngineResult:
        """Return the result of a finished sequence."""
        assert self.stop_reason is not None
        return EngineResult(
            token_ids=self.token_ids[self.n_prompt :],
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            weight_spans=tuple(self.weight_spans),
            sampling_logprobs=self.sampling_logprobs if self.is_shaped else None,
            top_logprobs=self.top_logprobs or None,
            n_reused=self.n_reused or 0,
            experts=self.experts,
        )


class SequenceQueue(Generic[S]):
    """The sequences of an engine, waiting or running, each in the order of arrival."""

    def __init__(self) -> None:
        self.waiting: deque[S] = deque()
        self.running: list[S] = []

    def __iter__(self) -> Iterator[S]:
        return chain(self.running, self.waiting)

    def take_finished(self) -> list[S]:
        """Remove and return the sequences that are over."""
        over = [sequence for sequence in self if sequence.is_over]
        if over:
            self.running = [sequence for sequence in self.running if not sequence.is_over]
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.is_over)
        return over

    def restart_all(self) -> None:
        """Make the running sequences wait again, before the sequences that arrived later."""
        self.waiting.extendleft(reversed(self.running))
        self.running = []

    def clear(self) -> None:
        """Remove all sequences."""
        self.running, self.waiting = [], deque()


def all_eos_ids(model_ids: int | list[int] | None, tokenizer_id: int | None) -> frozenset[int]:
    """Combine the EOS tokens of the model's generation config and the tokenizer."""
    listed = model_ids if isinstance(model_ids, list) else [model_ids]
    return frozenset(i for i in [*listed, tokenizer_id] if i is not None)


def find_stop_reason(
    sequence: ActiveSequence, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase
) -> StopReason | None:
    """Return why the response ends with its last token, or None if it continues."""
    sampling, n_sampled, last = sequence.sampling, len(sequence.logprobs), sequence.token_ids[-1]
    if (last in eos_ids and not sampling.ignore_eos) or last in sampling.stop_token_ids:
        return StopReason.STOP
    if sampling.stop and n_sampled >= sampling.min_new_tokens:
        # Decode only a tail that can contain the stop string: a token is at least one byte. One more token, because
        # some tokenizers drop the leading space of a string.
        n_tail = min(max(len(stop.encode()) for stop in sampling.stop) + 1, n_sampled)
        before, tail = (tokenizer.decode(sequence.token_ids[-n_tail:end]) for end in (-1, None))
        if any(stop in tail and stop not in before for stop in sampling.stop):
            return StopReason.STOP
    return StopReason.LENGTH if len(sequence.token_ids) >= sequence.max_tokens else None
