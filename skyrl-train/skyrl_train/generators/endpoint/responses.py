"""Answers in OpenAI's shape: whole, and as the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import uuid4

from skyrl_train.generators.endpoint.wire import CompletionOptions
from skyrl_train.inference_engines.base import EngineResult

Json = dict[str, Any]

LOWEST = -9999.0
"""Stands for the log-prob of what cannot happen: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One complete reply."""

    prompt_ids: list[int]
    result: EngineResult
    text: str


@dataclass(frozen=True, slots=True)
class Scored:
    """n sampled tokens with what the model said about them; None where the engine does not know."""

    token_ids: list[int]
    logprobs: list[float] | None
    top_logprobs: list[dict[int, float]] | None = None

    @staticmethod
    def of(result: EngineResult) -> Scored:
        """All tokens of a reply."""
        return Scored(result.token_ids, result.logprobs, result.top_logprobs)


class Answer(ABC):
    """Builds the answer to one request."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def __init__(self, asked: CompletionOptions, spell: Callable[[int], str]) -> None:
        """`spell` is the text of a token."""
        self._asked = asked
        self._spell = spell
        self._id = f"{self.id_prefix}-{uuid4().hex}"
        self._created = int(time.time())

    def whole(self, replies: Sequence[Reply]) -> Json:
        """The answer as one object."""
        choices = []
        for index, reply in enumerate(replies):
            choice = {"index": index, **self._content(reply.text), "finish_reason": reply.result.stop_reason}
            choice["logprobs"] = self._logprobs(index, Scored.of(reply.result))
            if self._asked.return_token_ids:
                choice["token_ids"] = reply.result.token_ids
            choices.append(choice)
        body = self._envelope(self.kind, choices, replies[0].result) | {"usage": self._usage(replies)}
        self._add_prompts(body, [reply.prompt_ids for reply in replies])
        return body

    def opening(self, prompts: Sequence[list[int]]) -> Json:
        """The first chunk of a stream, before there is any text."""
        choices = [{"index": index, **self._delta(None), "finish_reason": None} for index in range(len(prompts))]
        body = self._envelope(self.chunk_kind, choices)
        self._add_prompts(body, prompts)
        return self._with_usage(body)

    def piece(self, index: int, text: str, tokens: Scored, finish_reason: str | None = None) -> Json:
        """A chunk: text that has become certain, tokens that have come. The last one brings no new tokens."""
        choice = {"index": index, **self._delta(text), "finish_reason": finish_reason}
        choice["logprobs"] = self._logprobs(index, tokens) if tokens.token_ids else None
        if self._asked.return_token_ids:
            choice["token_ids"] = [] if finish_reason else tokens.token_ids
        return self._with_usage(self._envelope(self.chunk_kind, [choice]))

    def closing(self, replies: Sequence[Reply]) -> Json:
        """The chunk after the last, which only counts tokens."""
        return self._envelope(self.chunk_kind, [], replies[0].result) | {"usage": self._usage(replies)}

    @abstractmethod
    def _content(self, text: str) -> Json:
        """The part of a choice that holds the text."""

    @abstractmethod
    def _delta(self, text: str | None) -> Json:
        """The same in a chunk; None: nothing was said yet."""

    @abstractmethod
    def _logprobs_of(self, index: int, tokens: Scored, logprobs: list[float]) -> Json:
        """The log-probs of tokens of a choice."""

    @abstractmethod
    def _add_prompts(self, body: Json, prompts: Sequence[list[int]]) -> None:
        """Tell the tokens of each choice's prompt, where that was asked for."""

    def _logprobs(self, index: int, tokens: Scored) -> Json | None:
        if self._asked.n_top_logprobs is None or tokens.logprobs is None:
            return None
        return self._logprobs_of(index, tokens, tokens.logprobs)

    def _envelope(self, kind: str, choices: list[Json], result: EngineResult | None = None) -> Json:
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._asked.model}
        body["choices"] = choices
        if result is not None and result.weight_spans:
            body["system_fingerprint"] = f"weights-{result.weight_spans[-1].version}"
        return body

    def _with_usage(self, chunk: Json) -> Json:
        return chunk | {"usage": None} if self._asked.includes_usage else chunk

    def _usage(self, replies: Sequence[Reply]) -> Json:
        of_prompts = replies[:: self._asked.n_choices]  # the choices of a prompt share it
        n_prompt = sum(len(reply.prompt_ids) for reply in of_prompts)
        n_sampled = sum(len(reply.result.token_ids) for reply in replies)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_sampled,
            "total_tokens": n_prompt + n_sampled,
            "prompt_tokens_details": {"cached_tokens": sum(reply.result.n_reused for reply in of_prompts)},
        }


class ChatAnswer(Answer):
    """To POST /v1/chat/completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str | None) -> Json:
        return {"delta": {"role": "assistant", "content": ""} if text is None else {"content": text}}

    def _logprobs_of(self, index: int, tokens: Scored, logprobs: list[float]) -> Json:
        tops: Sequence[Mapping[int, float]] = tokens.top_logprobs or [{}] * len(logprobs)
        content = [
            self._token(token_id, logprob) | {"top_logprobs": [self._token(*pair) for pair in top.items()]}
            for token_id, logprob, top in zip(tokens.token_ids, logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._spell(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(text.encode())}

    def _add_prompts(self, body: Json, prompts: Sequence[list[int]]) -> None:
        if self._asked.return_token_ids:
            body["prompt_token_ids"] = prompts[0]


class CompletionAnswer(Answer):
    """To POST /v1/completions."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, asked: CompletionOptions, spell: Callable[[int], str]) -> None:
        super().__init__(asked, spell)
        self._n_told = Counter[int]()  # characters of each choice, in logprobs

    def _content(self, text: str) -> Json:
        return {"text": text}

    def _delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def _logprobs_of(self, index: int, tokens: Scored, logprobs: list[float]) -> Json:
        texts = [self._spell(token_id) for token_id in tokens.token_ids]
        *offsets, self._n_told[index] = accumulate(map(len, texts), initial=self._n_told[index])
        tops = [
            {self._spell(token_id): max(logprob, LOWEST) for token_id, logprob in top.items()}
            for top in tokens.top_logprobs or ()
        ]
        return {
            "tokens": texts,
            "token_logprobs": [max(logprob, LOWEST) for logprob in logprobs],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }

    def _add_prompts(self, body: Json, prompts: Sequence[list[int]]) -> None:
        if self._asked.return_token_ids:
            for choice in body["choices"]:
                choice["prompt_token_ids"] = prompts[choice["index"]]
