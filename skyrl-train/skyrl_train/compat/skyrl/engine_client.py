"""The engine with SkyRL's interface for generators: conversations in, text and token ids out."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypedDict, overload

from transformers import PreTrainedTokenizerBase

from skyrl_train.compat.skyrl.absent import CLIENT_METHODS, describe_missing
from skyrl_train.compat.skyrl.sampling_params import to_sampling, to_sampling_params
from skyrl_train.config.generator import GeneratorConfig, SamplingConfig
from skyrl_train.errors import DataError
from skyrl_train.inference_engines.base import EngineRequest, EngineResult, InferenceEngine, SamplingParams, hash_seed
from skyrl_train.rendering.template import ChatTemplate
from skyrl_train.types import Message, all_or_none

MAX_SESSIONS = 10_000
"""Maximum number of sessions whose cache the engine keeps, because SkyRL's generators do not end their sessions."""


class InferenceEngineInput(TypedDict, total=False):
    """SkyRL's input of `InferenceEngineClient.generate`: n conversations, or n lists of token ids."""

    prompts: list[list[Message]] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None  # under vLLM's names; None: from the configuration
    session_ids: list[Hashable] | None


class InferenceEngineOutput(TypedDict):
    """SkyRL's output: n responses in the order of the input."""

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None  # None if the engine cannot compute them


class InferenceEngineClient:
    """An engine whose `generate` also accepts SkyRL's input. All other attributes are the wrapped engine's."""

    def __init__(
        self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, cfg: GeneratorConfig, seed: int
    ) -> None:
        """Wrap an engine. Inputs without sampling parameters use `cfg.sampling_params`.

        A request's randomness is a function of `seed`, the session, and the request's index in its session.
        """
        self._engine = engine
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._cfg = cfg
        self._seed = seed
        self._n_requests: OrderedDict[str | None, int] = OrderedDict()  # by session, most recently used last

    @overload
    async def generate(self, inputs: InferenceEngineInput) -> InferenceEngineOutput: ...

    @overload
    async def generate(self, inputs: Sequence[EngineRequest]) -> list[EngineResult]: ...

    async def generate(
        self, inputs: InferenceEngineInput | Sequence[EngineRequest]
    ) -> InferenceEngineOutput | list[EngineResult]:
        """Return one response per prompt, or one result per request, in order.

        Raises:
            DataError: the input has both or neither of `prompts` and `prompt_token_ids`, a different number of
                `session_ids`, or an unknown sampling parameter.
            EngineError: generation failed.
        """
        if not isinstance(inputs, Mapping):
            return await self._engine.generate(inputs)
        results = await self._engine.generate(await self._to_requests(inputs))
        return InferenceEngineOutput(
            responses=[str(self._tokenizer.decode(r.token_ids, skip_special_tokens=True)) for r in results],
            response_ids=[result.token_ids for result in results],
            stop_reasons=[result.stop_reason for result in results],
            response_logprobs=all_or_none([result.logprobs for result in results]),
        )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine."""
        if name.startswith("_") or not hasattr(self._engine, name):
            raise AttributeError(describe_missing(self, name, CLIENT_METHODS))
        return getattr(self._engine, name)

    async def _to_requests(self, inputs: InferenceEngineInput) -> list[EngineRequest]:
        prompts, token_ids = inputs.get("prompts"), inputs.get("prompt_token_ids")
        if (prompts is None) == (token_ids is None):
            raise DataError("the input to generate needs either prompts or prompt_token_ids")
        if token_ids is None:
            texts = [self._template.render(prompt, adds_header=True) for prompt in prompts or ()]
            token_ids = [self._template.encode(text) for text in texts]
        sessions = inputs.get("session_ids") or [None] * len(token_ids)
        if len(sessions) != len(token_ids):
            raise DataError(f"generate got {len(sessions)} session_ids for {len(token_ids)} prompts")
        sampling = to_sampling(inputs.get("sampling_params"), self._cfg)
        requests = []
        for prompt_ids, session in zip(token_ids, sessions, strict=True):
            session_id = None if session is None else str(session)
            requests.append(EngineRequest(list(prompt_ids), sampling, await self._next_seed(session_id), session_id))
        return requests

    async def _next_seed(self, session_id: str | None) -> int:
        """Return the seed of a session's next request. Above `MAX_SESSIONS`, end the least recently used session."""
        number = self._n_requests.pop(session_id, 0)
        self._n_requests[session_id] = number + 1
        if len(self._n_requests) > MAX_SESSIONS:
            oldest, _ = self._n_requests.popitem(last=False)
            if oldest is not None:
                await self._engine.end_session(oldest)
        return hash_seed(f"{self._seed}/{session_id}/{number}")


def get_sampling_params_for_backend(
    backend: str, sampling_params: SamplingConfig | Mapping[str, Any]
) -> dict[str, Any]:
    """Return sampling parameters as a dictionary with vLLM's names. Every backend accepts them.

    `sampling_params` is a section of the configuration, or a dictionary with SkyRL's names.
    """
    if isinstance(sampling_params, SamplingConfig):
        return to_sampling_params(SamplingParams.from_config(sampling_params))
    return to_sampling_params(to_sampling(sampling_params, None))
