"""The interface of inference engines. Tokens in, tokens out; text exists only for environments."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl_train.config.generator import SamplingConfig
from skyrl_train.errors import EngineError
from skyrl_train.types import WeightSpan
from skyrl_train.weight_sync import Receipt, SyncPlan

StopReason = Literal["stop", "length", "abort"]

MIN_TEMPERATURE = 1e-4  # below, logits divided by it leave the range of float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response. Penalties act on logits; then come temperature, min-p, top-k and top-p."""

    max_new_tokens: int
    min_new_tokens: int = 0  # before that, no token that would end the response
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = (
        1.0  # divides positive logits of tokens of prompt and response, multiplies negative ones
    )
    presence_penalty: float = 0.0  # taken from the logits of tokens of the response
    frequency_penalty: float = 0.0  # likewise, times how often each is there
    stop: tuple[str, ...] = ()  # stop after the token that completes one of these; the text keeps it
    stop_token_ids: tuple[int, ...] = ()  # stop after one of these, as after the model's own end of sequence
    ignore_eos: bool = False  # the model's own end of sequence is a token like others
    n_top_logprobs: int = 0  # report this many most likely tokens at every position
    with_raw_logprobs: bool = False  # report log-probs at temperature 1 as well

    def __post_init__(self) -> None:
        """Values out of their range raise EngineError."""
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
        """The engine's view of `generator.sampling_params` or `generator.eval_sampling_params`."""
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
        """Whether logits depend on the tokens that are there already."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are out of reach."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One response to sample, e.g. `EngineRequest([5, 9, 2], SamplingParams(max_new_tokens=8), seed=1)`."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # with the position of a token, decides how it is sampled: batching and interruptions do not
    session_id: str | None = None  # requests of one session share a key-value cache until `end_session`


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The n sampled tokens of a response, and their log-probs.

    `logprobs` [n] are of the model at the request's temperature (1 if that is 0), before penalties and truncation: the
    number the trainer computes.
    """

    token_ids: list[int]
    logprobs: list[float] | None  # None: the engine cannot know them, e.g. of a truncated distribution
    stop_reason: StopReason
    weight_spans: tuple[WeightSpan, ...]
    sampling_logprobs: list[float] | None = None  # [n] of the distribution sampled from; None where it is the same
    raw_logprobs: list[float] | None = None  # [n] at temperature 1, on request
    top_logprobs: list[dict[int, float]] | None = None  # [n] most likely tokens, like `logprobs`, on request
    n_reused: int = 0  # tokens of the prompt that were not read again


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of a response that is being sampled; the last chunk has the result of the whole."""

    token_ids: list[int]
    logprobs: list[float]
    result: EngineResult | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits of an engine, known before the first request."""

    context_length: int  # tokens of prompt and response together that a sequence can have
    longest_sequence: int  # the same, or less where the engine's memory holds less


class InferenceEngine(Protocol):
    """The interface every backend implements. Everything that crosses it can be pickled."""

    @property
    def info(self) -> EngineInfo:
        """Limits of this engine."""
        ...

    @property
    def n_weight_copies(self) -> int:
        """Processes that receive new weights; see `WeightSync`."""
        ...

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result for each request, in order. Concurrent calls share the engine's batches.

        Requests wait while the engine is paused. Cancelling the call ends them.

        Raises:
            EngineError: a request that cannot be served, named with its numbers; a step failed; the engine is asleep
                or closed.
        """
        ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one response as they are sampled. Closing the generator ends the request."""
        ...

    async def abort(self, session_id: str | None = None) -> None:
        """End the requests of a session, or all, with the tokens they have, maybe none: stop reason `abort`."""
        ...

    async def pause(self) -> None:
        """Stop between two steps. Requests wait, new ones too; EngineError if it is paused already.

        Cancelled before the step ended, it has no effect.
        """
        ...

    async def resume(self) -> None:
        """Continue where `pause` stopped; EngineError if it is not paused."""
        ...

    async def end_session(self, session_id: str) -> None:
        """Drop a session's cache; unknown sessions are fine."""
        ...

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Take over new weights, as the receiver `plan.rank`, and report `plan.version` from now on.

        While the engine is paused, requests may be unfinished: they continue with the new weights, and what they have
        is read again. Otherwise that is an EngineError.
        """
        ...

    async def sleep(self) -> None:
        """Release memory until `wake_up`; EngineError while requests are running."""
        ...

    async def wake_up(self) -> None:
        """Make the engine ready for requests again; EngineError if it is closed."""
        ...

    async def close(self) -> None:
        """Release memory, threads and processes; requests still waiting fail with EngineError."""
        ...
