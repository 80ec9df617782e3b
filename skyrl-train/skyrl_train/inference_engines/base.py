"""The interface of inference engines. Tokens in, tokens out; text exists only for environments."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from skyrl_train.config.generator import SamplingConfig
from skyrl_train.errors import EngineError
from skyrl_train.types import Message, StopReason, WeightSpan
from skyrl_train.weight_sync import Receipt, SyncPlan

ConversationType = list[Message]
WakeUp = Literal["weights", "all"]

MIN_TEMPERATURE = 1e-4  # below, logits divided by it leave the range of float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling one response, applied in this order: penalties, temperature, min-p, top-k, top-p."""

    max_new_tokens: int
    min_new_tokens: int = 0  # until then, tokens that end the response have probability 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of tokens in prompt and response
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the response
    frequency_penalty: float = 0.0  # the same, times the number of their occurrences
    stop: tuple[str, ...] = ()  # stop after the token that completes one of these; the text keeps it
    stop_token_ids: tuple[int, ...] = ()  # stop after one of these, as after the EOS token
    ignore_eos: bool = False  # do not stop at the EOS token
    n_top_logprobs: int = 0  # report the log-probs of this many most likely tokens at every position
    with_raw_logprobs: bool = False  # report log-probs at temperature 1 as well

    def __post_init__(self) -> None:
        """Raise EngineError for a value out of its range."""
        for name, is_allowed, range_ in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", self.min_new_tokens >= 0, "at least 0"),
            ("temperature", self.temperature == 0 or self.temperature >= MIN_TEMPERATURE, "0, or at least 0.0001"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "at least 1, or -1 for all"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("n_top_logprobs", self.n_top_logprobs >= 0, "at least 0"),
        ):
            if not is_allowed:
                raise EngineError(f"{name}={getattr(self, name)} must be {range_}")

    @staticmethod
    def from_config(section: SamplingConfig) -> SamplingParams:
        """Convert `generator.sampling_params` or `generator.eval_sampling_params`."""
        return SamplingParams(
            max_new_tokens=section.max_generate_length,
            min_new_tokens=section.min_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            repetition_penalty=section.repetition_penalty,
            presence_penalty=section.presence_penalty,
            frequency_penalty=section.frequency_penalty,
            stop=tuple(section.stop or ()),
            stop_token_ids=tuple(section.stop_token_ids),
        )

    @property
    def penalizes(self) -> bool:
        """True if logits depend on earlier tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        """True if some tokens may have probability 0."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One response to sample, e.g. `EngineRequest([5, 9, 2], SamplingParams(max_new_tokens=8), seed=1)`."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # a token depends on the seed and its position, not on batching or interruptions
    session_id: str | None = None  # requests of one session share a key-value cache until `end_session`


def hash_seed(identity: str) -> int:
    """Return the 64-bit hash of a string as a seed."""
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The n sampled tokens of a response, and their log-probs.

    `logprobs` [n] are the model's at the request's temperature (1 if that is 0), before penalties and truncation, as
    the trainer computes them.
    """

    token_ids: list[int]
    logprobs: list[float] | None  # None: the engine cannot compute them, e.g. for a truncated distribution
    stop_reason: StopReason
    weight_spans: tuple[WeightSpan, ...]
    sampling_logprobs: list[float] | None = None  # [n] after penalties and truncation; None without them
    raw_logprobs: list[float] | None = None  # [n] at temperature 1, on request
    top_logprobs: list[dict[int, float]] | None = None  # [n] most likely tokens, like `logprobs`, on request
    n_reused: int = 0  # prompt tokens taken from the cache


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of a response that is being sampled; the last chunk has the whole result."""

    token_ids: list[int]
    logprobs: list[float]
    result: EngineResult | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits and weights of an engine, known before the first request."""

    context_length: int  # maximum tokens of prompt and response together
    longest_sequence: int  # the same, or less if the engine's memory holds less
    weight_dtype: torch.dtype | None = None  # in which the engine holds weights; None: as the policy sends them


class InferenceEngine(Protocol):
    """The interface every backend implements. Everything that crosses it can be pickled."""

    @property
    def info(self) -> EngineInfo:
        """Limits and weights of this engine."""
        ...

    @property
    def n_weight_copies(self) -> int:
        """Number of processes that receive new weights."""
        ...

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result for each request, in order. Concurrent calls share the engine's batches.

        Requests wait while the engine is paused. Cancelling the call aborts them.

        Raises:
            EngineError: a request cannot be served, a step failed, or the engine is asleep or closed.
        """
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one response as they are sampled. Closing the generator aborts the request."""
        ...

    async def abort(self, session_id: str | None = None) -> None:
        """End the requests of a session, or all requests; they return their tokens with stop reason `abort`."""
        ...

    async def pause(self) -> None:
        """Stop after the current step; EngineError if paused already. All requests, including new ones, wait.

        Cancelling the call before the step has ended undoes it.
        """
        ...

    async def resume(self) -> None:
        """Continue after `pause`; EngineError if not paused."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Drop a session's cache. Ignores unknown sessions."""
        ...

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Load new weights, as the receiver `plan.rank`; results report `plan.version` from now on.

        Unfinished requests are an EngineError unless the engine is paused. They continue with the new weights, after
        their prompt and response so far have been read again.
        """
        ...

    async def sleep(self) -> None:
        """Release memory until `wake_up`; EngineError while requests are running."""
        ...

    async def wake_up(self, what: WakeUp = "all") -> None:
        """Reload what `sleep` released; EngineError if the engine is closed.

        With `weights`, the engine can receive new ones before the memory of its cache is taken; it sleeps on until
        `wake_up("all")`.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineLostError if the engine cannot answer requests any more."""
        ...

    async def close(self) -> None:
        """Release memory, threads and processes; requests still waiting fail with EngineError."""
        ...
