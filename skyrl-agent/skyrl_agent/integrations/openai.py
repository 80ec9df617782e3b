"""Evaluation of a model behind the completions API of OpenAI, vLLM or SGLang."""

import asyncio
import logging
import os
from collections.abc import Sequence
from typing import Any

import openai
from transformers import PreTrainedTokenizerBase

from skyrl_gym.stop_reasons import StopReason
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult

logger = logging.getLogger(__name__)

TIMEOUT_S = 1800.0
SEED_MASK = 2**31 - 1


class OpenAIEngine:
    """A server that continues token ids. Its weights cannot be changed, so it only serves evaluations.

    vLLM returns the sampled tokens. For other servers, the returned text is tokenized.
    """

    def __init__(self, url: str, model: str, context_length: int, tokenizer: PreTrainedTokenizerBase) -> None:
        """Connect to the API at `url`, with the key in OPENAI_API_KEY. Self-hosted servers need none."""
        self.info = EngineInfo(context_length, context_length)
        self._model = model
        self._tokenizer = tokenizer
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), timeout=TIMEOUT_S, max_retries=5
        )
        self._returns_tokens: bool | None = None  # unknown before the first answer

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        """Return one result per request, in order, without log-probs. Raises EngineError if the server fails."""
        return list(await asyncio.gather(*map(self._sample, requests)))

    async def end_session(self, session_id: str) -> None:
        """Do nothing: the server has no sessions."""

    async def _sample(self, request: EngineRequest) -> EngineResult:
        sampling = request.sampling
        extra: dict[str, Any] = {
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": sampling.min_new_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        try:
            completion = await self._client.completions.create(
                model=self._model,
                prompt=request.prompt_ids,
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                stop=list(sampling.stop) or openai.omit,
                seed=request.seed & SEED_MASK,
                extra_body=extra,
            )
        except openai.OpenAIError as error:
            raise EngineError(f"the server at {self._client.base_url} failed: {error}") from error
        (choice,) = completion.choices
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is None:
            if self._returns_tokens is None:
                logger.warning("The server returns no token ids; its texts are tokenized again")
            token_ids = self._tokenizer(choice.text, add_special_tokens=False)["input_ids"]
            eos = self._tokenizer.eos_token_id
            if choice.finish_reason == "stop" and not sampling.stop and eos is not None and token_ids[-1:] != [eos]:
                token_ids = [*token_ids, eos]
            self._returns_tokens = False
        return EngineResult(
            list(token_ids), None, StopReason.LENGTH if choice.finish_reason == "length" else StopReason.STOP, ()
        )
