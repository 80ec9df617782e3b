"""Shared parts of OpenAI's Responses and Anthropic's Messages, whose replies are blocks: a thought, a text, and calls.

Requests are translated to chat requests, so all APIs share rendering, sampling and recording.
"""

import logging
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal
from uuid import uuid4

from pydantic import ValidationError

from skyrl_agent.endpoint.completions import ChatRequest, FinishedChoice, Json
from skyrl_agent.endpoint.replies import dump_arguments
from skyrl_agent.endpoint.wire import CompletionOptions, invalid, refuse
from skyrl_gym.tools.calls import ToolCall
from skyrl_train.inference_engines.base import TokenChunk

logger = logging.getLogger(__name__)

HOSTED_TOOLS = ("web_search", "web_fetch", "file_search", "tool_search", "code_", "image_generation", "mcp")
"""Prefixes of the types of tools that the provider runs."""


class BlockRequest(CompletionOptions):
    """A request of one of these APIs."""

    tools: list[Json] | None = None

    def _translate(self, messages: Sequence[Json], warned: set[str], **fields: Any) -> ChatRequest:
        """Return a chat request with `messages`, `fields` and the fields that all APIs share.

        Leave out hosted tools, with one warning per type. Raise RequestError for a field that has no equivalent.
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
    """Yield the chat functions of a tool: several for a namespace, and none for a hosted tool."""
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
    """Join system and developer messages at the start. Few templates accept several, or know the role `developer`."""
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


Kind = Literal["thought", "text", "call"]
BlockEvents = Mapping[Kind, tuple[Sequence[str], Sequence[str], Sequence[str]]]
"""Names of the events that start, extend and end a block of each kind."""


@dataclass(slots=True)
class Block:
    """A part of a reply."""

    index: int
    kind: Kind
    call: ToolCall | None = None
    text: str = ""  # so far. The text of a call is its arguments as JSON


class BlockBuilder(ABC):
    """Writes a reply as blocks. A stream starts, extends and ends one block after the other."""

    def __init__(self, events: BlockEvents) -> None:
        self._hex = uuid4().hex
        self._events = events
        self._open_block: Block | None = None
        self._blocks: list[Json] = []  # complete blocks
        self._is_truncated = False

    def complete(self, replies: Sequence[FinishedChoice]) -> Json:
        """Return the response as one body."""
        self.end(0, replies[0])
        return self._body(replies[0])

    def chunk(self, index: int, thought: str, content: str, tokens: TokenChunk | None = None) -> list[Json]:
        """Return the events for new text."""
        events = self._add("thought", thought) if thought else []
        return events + self._add("text", content) if content else events

    def end(self, index: int, finished: FinishedChoice) -> list[Json]:
        """Return the events for the rest of the text and for the calls."""
        self._is_truncated, reply = finished.is_truncated, finished.reply
        events = self.chunk(index, finished.thought, finished.content)
        events += [] if reply.calls or reply.content else self._add("text", "")
        for call in reply.calls:
            events += self._add("call", dump_arguments(call), call)
        return events + self._end_block()

    def _add(self, kind: Kind, piece: str, call: ToolCall | None = None) -> list[Json]:
        """Extend the open block. A different kind, and each call, starts a new one."""
        block, events = self._open_block, []
        start, extend, _ = self._events[kind]
        if block is None or block.kind != kind or call is not None:
            events += self._end_block()
            block = self._open_block = Block(len(self._blocks), kind, call)
            events += [self._block_event(name, block, "") for name in start]
        block.text += piece
        return events + [self._block_event(name, block, piece) for name in extend if piece]

    def _end_block(self) -> list[Json]:
        block, self._open_block = self._open_block, None
        if block is None:
            return []
        self._blocks.append(self._render(block))
        return [self._block_event(name, block, "") for name in self._events[block.kind][2]]

    # -- the format of an API: the body, a block, and each event of a block. `piece` is the new text.

    @abstractmethod
    def _body(self, finished: FinishedChoice) -> Json: ...

    @abstractmethod
    def _render(self, block: Block) -> Json: ...

    @abstractmethod
    def _block_event(self, name: str, block: Block, piece: str) -> Json: ...
