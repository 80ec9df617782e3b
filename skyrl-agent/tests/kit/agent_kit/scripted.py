"""Agents that call tools through the endpoint, and an engine that replies as a script says."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

from train_kit.templates import train_tokenizer
from transformers import PreTrainedTokenizerBase

from skyrl_train.inference_engines.base import EngineInfo, EngineRequest, EngineResult, TokenChunk
from skyrl_train.types import Segment, StopReason, WeightSpan

HERMES = """\
{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
{{ '\n' if m.content or not loop.first else '' }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADER = "<|im_start|>assistant\n"

Script = Callable[[str], str]
"""Returns the reply to a prompt."""


@cache
def hermes_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer whose template writes tools, calls and thoughts as Hermes and Qwen models do."""
    return train_tokenizer(["<|im_start|>", "<|im_end|>"], "<|im_end|>", "bytes", HERMES)


def write_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def take_turns(replies: Sequence[str]) -> Script:
    """Return a script with a reply for each turn of a conversation with tools, and a title for any other request."""

    def script(prompt: str) -> str:
        turn = prompt.count(HEADER) - 1
        return replies[turn] if prompt.startswith("<|im_start|>system\nTools: ") else "A title"

    return script


class CharacterEngine:
    """An engine that replies as a script says, one character per token, unlike any tokenizer would encode it."""

    n_weight_copies = 1

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Script) -> None:
        self.info = EngineInfo(1_000_000, 1_000_000)
        self.exchanges: list[tuple[EngineRequest, EngineResult]] = []
        self.ended: list[str] = []
        self._tokenizer, self._script = tokenizer, script

    def sample(self, text: str) -> list[int]:
        """Return the tokens of a reply, with the EOS token."""
        ids = [token_id for character in text for token_id in self._tokenizer(character)["input_ids"]]
        return [*ids, self._tokenizer.eos_token_id]

    async def generate(self, requests: Sequence[EngineRequest]) -> list[EngineResult]:
        return [self._reply(request) for request in requests]

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        result = self._reply(request)
        for start in range(0, len(result.token_ids), 3):
            span = slice(start, start + 3)
            last = result if span.stop >= len(result.token_ids) else None
            yield TokenChunk(result.token_ids[span], result.logprobs[span], last)

    async def end_session(self, session_id: str) -> None:
        self.ended.append(session_id)

    async def check_health(self) -> None:
        """Do nothing: the engine is always healthy."""

    async def close(self) -> None:
        """Do nothing: there are no processes."""

    def _reply(self, request: EngineRequest) -> EngineResult:
        token_ids = self.sample(self._script(str(self._tokenizer.decode(request.prompt_ids))))
        kept = token_ids[: request.sampling.max_new_tokens]
        reason = StopReason.STOP if len(kept) == len(token_ids) else StopReason.LENGTH
        logprobs = [-1.0 / (i + 2) for i in range(len(kept))]
        result = EngineResult(kept, logprobs, reason, (WeightSpan(0, len(kept)),))
        self.exchanges.append((replace(request, prompt_ids=list(request.prompt_ids)), result))
        return result


def trained_texts(tokenizer: PreTrainedTokenizerBase, row: Segment) -> list[str]:
    """Return the text of each trained stretch of a row."""
    ids = [id if is_trained else None for id, is_trained in zip(row.response_ids, row.loss_mask, strict=True)]
    stretches = [list(group) for is_trained, group in groupby(ids, lambda id: id is not None) if is_trained]
    return [str(tokenizer.decode(stretch)) for stretch in stretches]
