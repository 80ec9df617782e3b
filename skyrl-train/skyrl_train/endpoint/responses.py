"""Responses of the endpoint: the text of replies, and bodies in OpenAI's format, whole or in chunks."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from uuid import uuid4

from skyrl_train.endpoint.wire import CompletionOptions
from skyrl_train.inference_engines.base import EngineResult, TokenChunk

Json = dict[str, Any]
Decode = Callable[[Sequence[int]], str]
TopLogprobs = Sequence[Mapping[int, float]]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded text of an incomplete UTF-8 character
MIN_LOGPROB = -9999.0  # of impossible tokens, because JSON has no infinity


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice of the response, with its whole text."""

    prompt_ids: list[int]
    result: EngineResult
    text: str


# -- text


def reply_text(decode: Decode, result: EngineResult, stops: Sequence[str], *, keeps_stop: bool) -> str:
    """Return the text of a complete reply, up to the stop string that ended it."""
    text = decode(result.token_ids)
    if keeps_stop or not stops or result.stop_reason != "stop":
        return text
    n_before = len(decode(result.token_ids[:-1]).rstrip(INCOMPLETE))  # the last token completed the stop string
    found = [text.find(stop, max(0, n_before - len(stop) + 1)) for stop in stops]
    return text[: min((start for start in found if start >= 0), default=len(text))]


class TextStream:
    """An incremental decoder whose pieces add up to the text of the complete reply.

    It holds back incomplete characters, and text that may become a stop string.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], *, keeps_stop: bool) -> None:
        self._decode = decode
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._holds_back = bool(stops) and not keeps_stop
        self._n_held = max(map(len, stops), default=1) - 1  # characters that may start a stop string
        self._token_ids: list[int] = []
        self._window = 0  # start of the tokens that are decoded together with new ones
        self._n_read = 0  # tokens in `text` or `_pending`
        self._pending = ""
        self.text = ""  # returned so far

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the new text that later tokens can no longer change."""
        if not token_ids:
            return ""
        self._token_ids += token_ids
        before = self._decode(self._token_ids[self._window : self._n_read])
        now = self._decode(self._token_ids[self._window :])
        if now.endswith(INCOMPLETE):
            return ""
        n_certain = len(self._pending) - self._n_held  # of earlier tokens: none of them ended the reply
        self._pending += now[len(before) :]
        self._window, self._n_read = self._n_read, len(self._token_ids)
        return self._emit(self._pending[: max(0, n_certain)] if self._holds_back else self._pending)

    def finish(self, result: EngineResult) -> str:
        """Return the remaining text."""
        whole = reply_text(self._decode, result, self._stops, keeps_stop=self._keeps_stop)
        return self._emit(whole[len(self.text) :] if whole.startswith(self.text) else "")

    def _emit(self, piece: str) -> str:
        self._pending = self._pending[len(piece) :]
        self.text += piece
        return piece


# -- bodies


class ResponseBuilder:
    """The bodies of /v1/completions, and base class for the bodies of chats."""

    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, request: CompletionOptions, token_text: Callable[[int], str]) -> None:
        self._request = request
        self._token_text = token_text
        self._id = f"{self.id_prefix}-{uuid4().hex}"
        self._created = int(time.time())
        self._offsets = Counter[int]()  # characters of each choice that its logprobs cover so far

    def complete(self, replies: Sequence[FinishedChoice]) -> Json:
        """Return the response as one body."""
        choices = [
            self._choice(i, self._content(reply.text), reply.result, reply.result.stop_reason)
            for i, reply in enumerate(replies)
        ]
        return self._body(self.kind, choices, replies, [reply.prompt_ids for reply in replies])

    def first_chunk(self, prompts: Sequence[list[int]]) -> Json:
        """Return the first chunk of a stream, without text."""
        choices = [self._choice(i, self._delta(None), None) for i in range(len(prompts))]
        return self._body(self.chunk_kind, choices, prompts=prompts)

    def chunk(self, index: int, text: str, tokens: TokenChunk) -> Json:
        """Return a chunk with new text and new tokens."""
        return self._body(self.chunk_kind, [self._choice(index, self._delta(text), tokens)])

    def last_chunk(self, index: int, text: str, result: EngineResult, *, with_logprobs: bool) -> Json:
        """Return the last chunk of a choice, without tokens. `with_logprobs` adds the logprobs of all its tokens."""
        tokens = result if with_logprobs else None
        choice = self._choice(index, self._delta(text), tokens, result.stop_reason)
        if self._request.return_token_ids:
            choice["token_ids"] = []
        return self._body(self.chunk_kind, [choice])

    def usage_chunk(self, replies: Sequence[FinishedChoice]) -> Json:
        """Return the final chunk of a stream. It contains only the token counts."""
        return self._body(self.chunk_kind, [], replies)

    def _content(self, text: str) -> Json:
        """Return the fields of a choice that hold the text."""
        return {"text": text}

    def _delta(self, text: str | None) -> Json:
        """Return the fields of a chunk's choice that hold the text. `text` is None in the first chunk."""
        return {"text": text or ""}

    def _logprobs(self, index: int, token_ids: list[int], logprobs: list[float], tops: TopLogprobs) -> Json:
        """Return the logprobs of tokens of a choice. `tops` may be empty."""
        texts = [self._token_text(token_id) for token_id in token_ids]
        *offsets, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        named_tops: list[dict[str, float]] = [{} for _ in tops]
        for named, top in zip(named_tops, tops, strict=True):
            for token_id, logprob in top.items():  # tokens may have the same text: keep the likeliest
                text = self._token_text(token_id)
                named[text] = max(logprob, named.get(text, MIN_LOGPROB))
        return {
            "tokens": texts,
            "token_logprobs": [max(logprob, MIN_LOGPROB) for logprob in logprobs],
            "top_logprobs": named_tops or None,
            "text_offset": offsets,
        }

    def _add_prompts(self, body: Json, prompts: Sequence[list[int]]) -> None:
        """Add the token ids of each choice's prompt."""
        for choice in body["choices"]:
            choice["prompt_token_ids"] = prompts[choice["index"]]

    def _choice(
        self, index: int, content: Json, tokens: TokenChunk | EngineResult | None, finish_reason: str | None = None
    ) -> Json:
        choice = {"index": index, **content, "finish_reason": finish_reason, "logprobs": None}
        if tokens and tokens.logprobs and self._request.n_top_logprobs is not None:
            tops = (tokens.top_logprobs or ()) if isinstance(tokens, EngineResult) else ()
            choice["logprobs"] = self._logprobs(index, tokens.token_ids, tokens.logprobs, tops)
        if self._request.return_token_ids:
            choice["token_ids"] = tokens.token_ids if tokens else []
        return choice

    def _body(
        self, kind: str, choices: list[Json], replies: Sequence[FinishedChoice] = (), prompts: Sequence[list[int]] = ()
    ) -> Json:
        """Return a body. With complete `replies`, it has token counts and the version of the weights."""
        body = {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}
        body["choices"] = choices
        if replies:
            body["usage"] = self._usage(replies)
            if spans := replies[0].result.weight_spans:
                body["system_fingerprint"] = f"weights-{spans[-1].version}"
        elif self._request.includes_usage:
            body["usage"] = None
        if prompts and self._request.return_token_ids:
            self._add_prompts(body, prompts)
        return body

    def _usage(self, replies: Sequence[FinishedChoice]) -> Json:
        first_choices = replies[:: self._request.n_choices]  # the choices of a prompt share it
        n_prompt = sum(len(reply.prompt_ids) for reply in first_choices)
        n_sampled = sum(len(reply.result.token_ids) for reply in replies)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_sampled,
            "total_tokens": n_prompt + n_sampled,
            "prompt_tokens_details": {"cached_tokens": sum(reply.result.n_reused for reply in first_choices)},
        }


class ChatResponseBuilder(ResponseBuilder):
    """The bodies of /v1/chat/completions."""

    kind, chunk_kind, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str | None) -> Json:
        return {"delta": {"role": "assistant", "content": ""} if text is None else {"content": text}}

    def _logprobs(self, index: int, token_ids: list[int], logprobs: list[float], tops: TopLogprobs) -> Json:
        content = [
            self._token(token_id, logprob) | {"top_logprobs": [self._token(*pair) for pair in top.items()]}
            for token_id, logprob, top in zip(token_ids, logprobs, tops or [{}] * len(logprobs), strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        is_whole = INCOMPLETE not in text  # the bytes of a part of a character are unknown
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(text.encode()) if is_whole else None}

    def _add_prompts(self, body: Json, prompts: Sequence[list[int]]) -> None:
        body["prompt_token_ids"] = prompts[0]
