"""Sample rollouts with a Tinker service."""

import asyncio
from collections.abc import Sequence

import tinker

from skyrl_agent.integrations.tinker.inputs import model_input
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult
from skyrl_train.types import StopReason, WeightSpan

SEED_MASK = 2**31 - 1


class TinkerEngine:
    """The part of `InferenceEngine` that a generator calls, on a Tinker sampling client. Each step loads a new one."""

    def __init__(self, context_length: int, *, reads_images: bool = False) -> None:
        self.info = EngineInfo(context_length, context_length, reads_images=reads_images)
        self._client: tinker.SamplingClient | None = None
        self._version = 0

    def load(self, client: tinker.SamplingClient, version: int) -> None:
        """Sample from new weights from now on."""
        self._client, self._version = client, version

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result per request, in order, or raise EngineError for settings that Tinker does not support."""
        return list(await asyncio.gather(*map(self._sample, requests)))

    async def end_session(self, session_id: str) -> None:
        """Do nothing, because Tinker has no sessions."""

    async def _sample(self, request: EngineRequest) -> EngineResult:
        sampling = request.sampling
        if sampling.penalizes or sampling.min_p or sampling.stop_token_ids or sampling.min_new_tokens:
            raise EngineError(f"Tinker samples without penalties, min_p, min_tokens and stop tokens; got {sampling}")
        if request.images and not self.info.reads_images:
            raise EngineError("a request has images, but the model reads only text; use a vision-language model")
        assert self._client is not None
        response = await self._client.sample(
            model_input(request.prompt_ids, request.images),
            1,
            tinker.SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=request.seed & SEED_MASK,
                stop=list(sampling.stop) or None,
            ),
        )
        (sequence,) = response.sequences
        tokens, logprobs = list(sequence.tokens), sequence.logprobs
        return EngineResult(
            tokens,
            None if logprobs is None else list(logprobs),
            StopReason.STOP if sequence.stop_reason == "stop" else StopReason.LENGTH,
            (WeightSpan(self._version, len(tokens)),),
        )
