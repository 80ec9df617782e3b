"""Shared parts of OpenAI's Responses and Anthropic's Messages, whose replies are blocks: a thought, a text, and calls.

A request becomes a chat request, so all APIs render, sample and record alike.
"""

import logging
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from skyrl_gym.tools.calls import ToolCall
from skyrl_train.endpoint.completions import FinishedChoice, Json
from skyrl_train.endpoint.wire import ChatRequest, CompletionOptions, invalid, refuse
from skyrl_train.inference_engines.base import TokenChunk

logger = logging.getLogger(__name__)

HOSTED_TOOLS = ("web_search", "web_fetch", "file_search", "tool_search", "code_", "image_generation", "mcp")
"""Beginnings of the types of tools that the provider runs."""


class BlockRequest(CompletionOptions):
    """A request of one of these APIs."""

    tools: list[Json] | None = None

    def _translate(self, messages: Sequence[Json], warned: set[str], **fields: Any) -> ChatRequest:
        """Return the chat request with `messages` and `fields`, and with the fields that all APIs share.

        Hosted tools are left out, and warn once. Raise RequestError for a field that has no equivalent.
        """
        self.check_offered()
        if self.n_choices > 1 or self.return_token_ids:
            name = "n" if self.n_choices > 1 else "return_token_ids"
            refuse(f"{name} is not supported here; remove it or use /v1/chat/completions", param=name)
        same = self.model_dump(include=set(CompletionOptions.model_fields), exclude_none=True)
        tools = [function for tool in self.tools or () for function in _read_tool(tool, warned)]
        try:
            return ChatRequest(**same | {"messages": _join_system(messages), "tools": tools or None, **fields})
        except ValidationError as error:
            raise invalid(error.errors()[0]) from error


def _read_tool(tool: Json, warned: set[str]) -> Iterator[Json]:
    """Yield the chat functions that a tool consists of. A namespace has several, and hosted tools none."""
    kind, name, inner = tool.get("type", "function"), tool.get("name"), tool.get("tools")
    if kind == "namespace" and isinstance(inner, list) and all(isinstance(one, dict) for one in inner):
        for one in inner:
            yield from _read_tool({**one, "name": f"{name}__{one.get('name')}"}, warned)
        return
    if str(kind).startswith(HOSTED_TOOLS):
        if kind not in warned:
            warned.add(kind)
            logger.warning("Requests offer %r, which only the provider can run. It is left out of the prompt.", kind)
        return
    is_function = kind == "function" or (kind == "custom" and "input_schema" in tool)  # as Anthropic's clients write it
    if not is_function:
        refuse(f"tools of type {str(kind)[:80]!r} are not supported; describe the tool as a function", param="tools")
    if not isinstance(name, str) or not name:
        refuse("a tool has no name", param="tools")
    fields = {"name": name, "description": tool.get("description")}
    fields |= {"parameters": tool.get("input_schema", tool.get("parameters")), "strict": tool.get("strict") or None}
    yield {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def _join_system(messages: Sequence[Json]) -> list[Json]:
    """Join the system messages at the start, as many templates write only one, and few know the role `developer`."""
    named = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    start = list(takewhile(lambda one: one["role"] == "system" and isinstance(one["content"], str | list), named))
    contents = [one["content"] for one in start]
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
    joined = [part for one in parts for part in (*one, {"type": "text", "text": "\n\n"})][:-1]
    return [{"role": "system", "content": joined}, *named[len(start) :]] if joined else named


def seal_thought(thought: str) -> str:
    """Encode a thought for a client that sends it back but does not show it."""
    return b64encode(thought.encode(errors="surrogatepass")).decode()


def open_thought(sealed: Any, param: str) -> str:
    """Decode a thought. Raise RequestError if another server has encoded it."""
    try:
        return b64decode(sealed or "", validate=True).decode(errors="surrogatepass")
    except (TypeError, ValueError):
        refuse("a thought was encrypted by another server; remove it", param=param)


class BlockBuilder(ABC):
    """Writes a reply as blocks. A stream opens, extends and closes one block after the other.

    A block has a kind and a value: `thought` and `text` have a text, and `call` has a call.
    """

    last_event: str | None = None

    def __init__(self) -> None:
        self._hex = uuid4().hex
        self._index = -1  # of the latest block
        self._kind: str | None = None  # of the open block
        self._text = ""  # of the open block
        self._is_truncated = False

    def complete(self, replies: Sequence[FinishedChoice]) -> Json:
        """Return the response as one body."""
        (finished,) = replies
        self._is_truncated, reply = finished.is_truncated, finished.reply
        parts: list[tuple[str, str | ToolCall]] = [("thought", reply.thought)] * bool(reply.thought)
        parts += [("text", reply.content)] * bool(reply.content or not reply.calls)
        parts += [("call", call) for call in reply.calls]
        return self._body(finished, [self._block(index, kind, value) for index, (kind, value) in enumerate(parts)])

    def chunk(self, index: int, thought: str, content: str, tokens: TokenChunk | None = None) -> list[Json]:
        """Return the events for new text."""
        pieces = {"thought": thought, "text": content}
        return [event for kind, piece in pieces.items() if piece for event in self._add(kind, piece)]

    def end(self, index: int, thought: str, content: str, finished: FinishedChoice) -> list[Json]:
        """Return the events for the rest of the text and for the calls."""
        self._is_truncated, reply = finished.is_truncated, finished.reply
        events = self.chunk(index, thought, content)
        events += [] if reply.calls or reply.content else self._add("text", "")
        events += self._end_block()
        for call in reply.calls:
            self._index += 1
            events += [*self._open("call", call), *self._extend("call", call), *self._close("call", call)]
        return events

    def _add(self, kind: str, piece: str) -> list[Json]:
        events = []
        if self._kind != kind:
            events += self._end_block()
            self._index, self._kind, self._text = self._index + 1, kind, ""
            events += self._open(kind, "")
        self._text += piece
        return events + (self._extend(kind, piece) if piece else [])

    def _end_block(self) -> list[Json]:
        kind, self._kind = self._kind, None
        return [] if kind is None else self._close(kind, self._text)

    # -- the format of an API: the body, a block, and the events that start, extend and end the block at `_index`

    @abstractmethod
    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json: ...

    @abstractmethod
    def _block(self, index: int, kind: str, value: str | ToolCall) -> Json: ...

    @abstractmethod
    def _open(self, kind: str, value: str | ToolCall) -> list[Json]: ...

    @abstractmethod
    def _extend(self, kind: str, value: str | ToolCall) -> list[Json]: ...

    @abstractmethod
    def _close(self, kind: str, value: str | ToolCall) -> list[Json]: ...
