"""What an inference engine takes and gives. Tokens in, tokens out; text exists only for environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from skyrl_train.config.generator import SamplingConfig


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    stop: tuple[str, ...] = ()  # stop after the token that completes one of these; the text keeps it

    @staticmethod
    def from_config(section: SamplingConfig) -> SamplingParams:
        """The engine's view of `generator.sampling_params` or `generator.eval_sampling_params`."""
        return SamplingParams(
            max_new_tokens=section.max_generate_length,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            stop=tuple(section.stop or ()),
        )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One response to sample, e.g. `EngineRequest([5, 9, 2], SamplingParams(max_new_tokens=8), seed=1)`."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # with the position of a token, decides how it is sampled: batching and interruptions do not
    session_id: str | None = None  # requests of one session share a key-value cache until `end_session`


@dataclass(frozen=True, slots=True)
class EngineResult:
    """What was sampled. `logprobs` [n] are of `token_ids` [n] at the request's temperature (1 if that is 0)."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length"]
    weight_version: int


class InferenceEngine(Protocol):
    """The interface every backend implements."""

    context_length: int
    """Tokens of prompt and response together that a sequence can have."""

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """One result for each request, in order. Concurrent calls share the engine's batches.

        Raises:
            EngineError: a request that cannot be served, named with its numbers.
        """
        ...

    def end_session(self, session_id: str) -> None:
        """Forget a session's cache; unknown sessions are fine."""
        ...

    async def sync_weights(self, weight_version: int) -> None:
        """Take over the policy's current weights and report `weight_version` from now on."""
        ...

    async def close(self) -> None:
        """Release memory and threads; requests still waiting fail with EngineError."""
        ...
