"""OpenAI's chat and text completions: requests, and replies as bodies, whole or in chunks."""

import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Annotated, Any
from uuid import uuid4

from annotated_types import Ge, Le, MinLen

from skyrl_agent.endpoint.replies import INCOMPLETE, Reply
from skyrl_agent.endpoint.wire import CompletionOptions, Count, NonEmpty, RequestError, TokenId, WireModel, refuse
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import parse_parts, read_parts
from skyrl_gym.tools.strict_json import check_depth
from skyrl_train.inference_engines.base import EngineResult, TokenChunk
from skyrl_train.rendering.messages import THOUGHT_FIELDS, get_function
from skyrl_train.types import StopReason

Json = dict[str, Any]
TopLogprobs = Sequence[Mapping[int, float]]

MAX_PROMPTS = 1024
MAX_TOP_LOGPROBS = 20
MIN_LOGPROB = -9999.0  # of impossible tokens, because JSON has no infinity


class ContentPart(WireModel):
    """A part of a message's content: text, or an image in OpenAI's or Anthropic's form."""

    type: str
    text: str | None = None


class ChatMessage(WireModel):
    """A message of a chat request."""

    role: NonEmpty
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None

    def to_message(self) -> dict[str, Any]:
        """Convert the message for the chat template, and read its images. Empty fields are dropped, except the text."""
        names = ("name", "tool_call_id", "tool_calls", *THOUGHT_FIELDS)
        others = {name: value for name in names if (value := getattr(self, name))}
        content = _read_content(self.content) if isinstance(self.content, list) else self.content or ""
        return {"role": self.role, "content": content, **others}


def _read_content(content: Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    """Return text, or parts with images. Only data URLs are read: a client must not read the trainer's files."""
    try:
        parts = parse_parts([part.model_dump(exclude_none=True) for part in content])
        sources = [part["image"] for part in parts if part["type"] == "image"] if isinstance(parts, list) else []
        for source in sources:
            if source is not None and not (isinstance(source, str) and source.startswith("data:")):
                message = f"the image {reprlib.repr(source)} is not a data URL; send data:image/png;base64,…"
                refuse(message, param="messages")
        return read_parts(parts)
    except InvalidAnswer as error:
        refuse(str(error), param="messages")


class ChatRequest(CompletionOptions):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], MinLen(1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def tool_parameters(self) -> dict[str, dict[str, Any]]:
        """JSON Schema of the arguments of each tool, by name."""
        functions = [get_function(tool) for tool in self.tools or ()]
        check_depth(functions)
        for function in functions:
            is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
            if not (is_named and isinstance(function.get("parameters"), dict | None)):
                form = '{"type": "function", "function": {"name": "look", "parameters": {…}}}'
                refuse(f"the tool {reprlib.repr(function)} is malformed; write {form}", param="tools")
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def may_call_tools(self) -> bool:
        """True unless the client forbids calls."""
        return (self.model_extra or {}).get("tool_choice") != "none"

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of tokens of a reply. `max_completion_tokens` takes precedence over `max_tokens`."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def n_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each position."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_offered(self) -> None:
        """Reject unsupported fields that would change the answer, and `top_logprobs` without `logprobs`."""
        super().check_offered()
        if self.top_logprobs and not self.logprobs:
            refuse(f"top_logprobs={self.top_logprobs} without logprobs; set logprobs to true", param="top_logprobs")


class CompletionRequest(CompletionOptions):
    """The body of POST /v1/completions: one or several prompts, as text or token ids."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None

    @property
    def n_top_logprobs(self) -> int | None:
        """Number of most likely tokens to report at each position."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[Any] = list(self.prompt)
        return [prompts] if prompts and isinstance(prompts[0], int) else prompts


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice of the response, with its whole reply."""

    prompt_ids: list[int]
    result: EngineResult
    reply: Reply
    thought: str = ""  # the end of the reply's thought, which has not been streamed
    content: str = ""  # the end of its content

    @property
    def finish_reason(self) -> str:
        """The stop reason, or `tool_calls` for a complete reply with calls."""
        return "tool_calls" if self.reply.calls and not self.is_truncated else self.result.stop_reason

    @property
    def is_truncated(self) -> bool:
        """True if the reply reached its maximum length, or the engine aborted it."""
        return self.result.stop_reason != StopReason.STOP

    def count_tokens(self) -> tuple[int, int, int]:
        """Return the numbers of prompt tokens, cached prompt tokens, and sampled tokens."""
        return len(self.prompt_ids), self.result.n_reused, len(self.result.token_ids)


class ResponseBuilder:
    """The bodies of /v1/completions. Base class for the bodies of chats."""

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
            self._choice(i, self._content(choice.reply), choice.result, choice.finish_reason)
            for i, choice in enumerate(replies)
        ]
        return self._body(self.kind, choices, replies, [reply.prompt_ids for reply in replies])

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the first chunk, without text."""
        choices = [self._choice(i, self._delta("", ""), None) for i in range(len(prompts))]
        return [self._body(self.chunk_kind, choices, prompts=prompts)]

    def chunk(self, index: int, thought: str, content: str, tokens: TokenChunk) -> list[Json]:
        """Return a chunk. With top logprobs, all logprobs are in the last chunk: the engine reports tops at the end."""
        tokens = replace(tokens, logprobs=[]) if self._request.n_top_logprobs else tokens
        return [self._body(self.chunk_kind, [self._choice(index, self._delta(thought, content), tokens)])]

    def end(self, index: int, finished: FinishedChoice) -> list[Json]:
        """Return a chunk for each call, and one with the rest of the text and the finish reason."""
        tokens = finished.result if self._request.n_top_logprobs else None
        choice = self._choice(index, self._delta(finished.thought, finished.content), tokens, finished.finish_reason)
        if self._request.return_token_ids:
            choice["token_ids"] = []
        calls = finished.reply.wire_calls()
        deltas = [{"delta": {"tool_calls": [{"index": i, **call}]}} for i, call in enumerate(calls)]
        choices = [self._choice(index, delta, None) for delta in deltas]
        return [self._body(self.chunk_kind, [choice]) for choice in (*choices, choice)]

    def finish(self, replies: Sequence[FinishedChoice]) -> list[Json | str]:
        """Return a chunk that contains only the token counts, if the client wants it, and the end of the stream."""
        usage = [self._body(self.chunk_kind, [], replies)] if self._request.includes_usage else []
        return [*usage, "[DONE]"]

    def fail(self, error: RequestError) -> Json:
        """Return OpenAI's error body."""
        return error.body()

    def _content(self, reply: Reply) -> Json:
        """Return the fields of a choice that hold the reply."""
        return self._delta("", reply.content)

    def _delta(self, thought: str, content: str) -> Json:
        """Return the fields of a chunk's choice that hold new text."""
        return {"text": content}

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

    def _content(self, reply: Reply) -> Json:
        return {"message": reply.to_message()}

    def start(self, prompts: Sequence[list[int]]) -> list[Json]:
        """Return the first chunk, with the role."""
        (chunk,) = super().start(prompts)
        for choice in chunk["choices"]:
            choice["delta"] = {"role": "assistant", "content": ""}
        return [chunk]

    def _delta(self, thought: str, content: str) -> Json:
        return {"delta": {"content": content} | ({"reasoning_content": thought} if thought else {})}

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
