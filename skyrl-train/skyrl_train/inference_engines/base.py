"""The interface of inference engines: tokens in, tokens out. Text exists only for environments."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from skyrl_train.config.generator import SamplingConfig
from skyrl_train.errors import EngineError
from skyrl_train.media.spans import ImageSpan
from skyrl_train.types import StopReason, WeightSpan
from skyrl_train.weight_sync import Receipt, SyncPlan

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from skyrl_train.config import SkyRLConfig

WakeUp = Literal["weights", "all"]

MIN_TEMPERATURE = 1e-4  # dividing logits by less may overflow float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for sampling a response. They apply in this order: penalties, temperature, min-p, top-k, top-p."""

    max_new_tokens: int
    min_new_tokens: int = 0  # before that, tokens that end the response have probability 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = -1  # -1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # positive logits of tokens in prompt or response are divided, negative multiplied
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the response
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the response
    stop: tuple[str, ...] = ()  # stop after the token that completes one of these, and keep it in the text
    stop_token_ids: tuple[int, ...] = ()  # stop after one of these, like after the EOS token
    ignore_eos: bool = False  # do not stop at the EOS token
    n_top_logprobs: int = 0  # report the log-probs of this many most likely tokens at every position

    def __post_init__(self) -> None:
        """Raise EngineError if a value is out of range."""
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
        renamed = {"max_generate_length", "min_tokens", "stop", "stop_token_ids", "logprobs"}
        return SamplingParams(
            max_new_tokens=section.max_generate_length,
            min_new_tokens=section.min_tokens,
            stop=tuple(section.stop or ()),
            stop_token_ids=tuple(section.stop_token_ids),
            **section.model_dump(exclude=renamed),
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
    """A response to sample, e.g. `EngineRequest([5, 9, 2], SamplingParams(max_new_tokens=8), seed=1)`."""

    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int  # with the position, decides each token, whatever the batch. vLLM's own sampler ignores it.
    session_id: str | None = None  # requests of one session share a key-value cache until `end_session`
    images: tuple[ImageSpan, ...] = ()  # in order, where the prompt has their placeholder tokens


def hash_seed(identity: str) -> int:
    """Hash a string into a 64-bit seed."""
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The n sampled tokens of a response, and their log-probs.

    `logprobs` [n] are comparable with the trainer's: at the request's temperature (1 if it is 0), and before penalties
    and truncation.
    """

    token_ids: list[int]
    logprobs: list[float] | None  # None: the engine cannot compute them, e.g. for a truncated distribution
    stop_reason: StopReason
    weight_spans: tuple[WeightSpan, ...]
    sampling_logprobs: list[float] | None = None  # [n] after penalties and truncation, or None without them
    top_logprobs: list[dict[int, float]] | None = None  # [n] most likely tokens, like `logprobs`, on request
    n_reused: int = 0  # prompt tokens taken from the cache
    experts: np.ndarray | None = None
    """(n, layers, K) int16, if recorded: the experts chosen for the tokens of prompt and response, -1 where unknown.
    Excludes the last token, which the engine did not read."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of a response in progress. The last chunk contains the whole result."""

    token_ids: list[int]
    logprobs: list[float]
    result: EngineResult | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Limits and weights of an engine, known before the first request."""

    context_length: int  # maximum tokens of prompt and response together
    longest_sequence: int  # `context_length`, or less if the engine's cache is smaller
    weight_dtype: torch.dtype | None = None  # of the engine's weights (None: the dtype that the policy sends)
    reads_images: bool = False  # requests may have images


class InferenceEngine(Protocol):
    """The interface of every engine. All arguments and results can be pickled."""

    @property
    def info(self) -> EngineInfo:
        """Limits and weights of this engine."""

    @property
    def n_weight_copies(self) -> int:
        """Number of processes that receive new weights."""

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result per request, in order. The engine batches the requests of concurrent calls together.

        Requests wait while the engine is paused. Cancelling the call aborts its requests.

        Raises:
            EngineError: a request cannot be served, a step failed, or the engine is asleep or closed.
        """

    def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Yield the tokens of one response as they are sampled. Closing the generator aborts the request."""

    async def abort(self, session_id: str | None = None) -> None:
        """End a session's requests, or all requests. Each returns its tokens so far with stop reason `abort`."""

    async def pause(self) -> None:
        """Stop after the current step. All requests, including new ones, wait until `resume`.

        Cancelling the call before the step has ended undoes it.

        Raises:
            EngineError: the engine is already paused.
        """

    async def resume(self) -> None:
        """Continue after `pause`. Raise EngineError if the engine is not paused."""

    async def end_session(self, session_id: str) -> None:
        """Drop a session's cache. Ignores unknown sessions."""

    async def receive_weights(self, plan: SyncPlan) -> Receipt:
        """Load new weights as receiver `plan.rank`. Results report `plan.version` from now on.

        Pause the engine first if requests are unfinished. Afterwards, their prompts and partial responses are
        recomputed, so they continue with the new weights.

        Raises:
            EngineError: requests are unfinished and the engine is not paused.
        """

    async def sleep(self) -> None:
        """Release memory until `wake_up`. Raise EngineError if requests are running."""

    async def wake_up(self, what: WakeUp = "all") -> None:
        """Allocate the memory that `sleep` released. Raise EngineError if the engine is closed.

        `weights` allocates only the weights, so that a sync can run before the cache takes its memory. The engine
        still counts as asleep until `wake_up("all")`.
        """

    async def check_health(self) -> None:
        """Raise EngineLostError if the engine can no longer answer requests."""

    async def close(self) -> None:
        """Release memory, threads and processes. Unfinished requests fail with EngineError."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Configuration, tokenizer, model and memory budget for an engine."""

    cfg: SkyRLConfig
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel | None = None  # the policy, for the embedded engine
    usable_bytes: int = 0  # memory for everything that the engine holds, its own weights included
    total_bytes: int = 1  # memory of the device
    executor: ThreadPoolExecutor | None = None  # the thread that computes, or None if the process is the engine's


def weight_folder(cfg: SkyRLConfig) -> Path:
    """Return the folder through which engines that read files get new weights."""
    return Path(cfg.trainer.run_dir) / "engine_weights"
