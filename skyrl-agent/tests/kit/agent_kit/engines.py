"""An engine that replies as a script says, with the tokens of a real tokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from skyrl_train.entrypoints.tiny import DEFAULT_TEXT, train_tokenizer
from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult
from skyrl_train.types import WeightSpan

Script = Callable[[str, int], str]
"""Returns the reply to a prompt, the n-th of its session."""

TOKENIZER: PreTrainedTokenizerBase = train_tokenizer([DEFAULT_TEXT])


def tool_call(name: str, **arguments: str) -> str:
    parameters = "\n".join(f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}\n</function>"


class ScriptedEngine:
    """Replies in turn, in every session: the n-th of a list, or what a function returns for the prompt's text."""

    def __init__(self, replies: Sequence[str] | Script = (), context_length: int = 1_000_000) -> None:
        self.info = EngineInfo(context_length, context_length)
        self.requests: list[EngineRequest] = []
        self.n_ended = 0
        self._script: Script = replies if callable(replies) else lambda prompt, turn: replies[turn]
        self._turns: dict[str | None, int] = {}

    def prompts(self) -> list[str]:
        return [str(TOKENIZER.decode(request.prompt_ids)) for request in self.requests]

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        await asyncio.sleep(0)
        return [self._reply(request) for request in requests]

    async def end_session(self, session_id: str) -> None:
        self.n_ended += 1

    def _reply(self, request: EngineRequest) -> EngineResult:
        self.requests.append(replace(request, prompt_ids=list(request.prompt_ids)))  # the list grows
        turn = self._turns[request.session_id] = self._turns.get(request.session_id, -1) + 1
        text = self._script(str(TOKENIZER.decode(request.prompt_ids)), turn)
        token_ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        kept = token_ids[: request.sampling.max_new_tokens]
        return EngineResult(
            kept, [-0.5] * len(kept), "stop" if len(kept) == len(token_ids) else "length", (WeightSpan(0, len(kept)),)
        )
