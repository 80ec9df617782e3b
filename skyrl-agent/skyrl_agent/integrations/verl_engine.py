"""Sampling on verl's servers. Does not import verl."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from skyrl_train.compat.skyrl.sampling_params import to_sampling_params
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult
from skyrl_train.types import StopReason


class VerlEngine:
    """An engine that samples on verl's servers, through verl's server manager."""

    def __init__(self, server_manager: Any, context_length: int) -> None:
        """Sample with `server_manager.generate`."""
        self.info = EngineInfo(context_length, context_length)
        self._server_manager = server_manager

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result per request, in order."""
        return list(await asyncio.gather(*map(self._sample, requests)))

    async def end_session(self, session_id: str) -> None:
        """Do nothing: verl's servers evict the caches of finished conversations."""

    async def _sample(self, request: EngineRequest) -> EngineResult:
        params = to_sampling_params(request.sampling)
        output = await self._server_manager.generate(
            request.session_id or uuid4().hex,  # requests with the same ID go to the same server
            prompt_ids=request.prompt_ids,
            sampling_params={**params, "logprobs": True},
        )
        token_ids = list(output.token_ids)
        is_cut_off = len(token_ids) >= request.sampling.max_new_tokens
        stop_reason = output.stop_reason or ("length" if is_cut_off else "stop")
        return EngineResult(
            token_ids,
            None if output.log_probs is None else list(output.log_probs),
            StopReason.ABORT
            if stop_reason in ("abort", "aborted")
            else StopReason.LENGTH
            if is_cut_off
            else StopReason.STOP,
            (),
        )
