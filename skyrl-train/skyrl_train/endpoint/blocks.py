"""APIs whose replies are blocks (a thought, a text, calls): the shared parts of OpenAI's Responses and Anthropic's Messages.

A request is translated to the chat request with the same messages, so every API is rendered, sampled and recorded alike.
"""

import binascii
import logging
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import ValidationError

from skyrl_gym.tools.calls import ToolCall
from skyrl_train.endpoint.completions import FinishedChoice, Json
from skyrl_train.endpoint.replies import Reply
from skyrl_train.endpoint.wire import ChatRequest, CompletionOptions, ContentPart, invalid, refuse
from skyrl_train.inference_engines.base import TokenChunk

logger = logging.getLogger(__name__)

HOSTED_TOOLS = ("web_search", "web_fetch", "file_search", "tool_search", "code_", "image_generation", "mcp")
"""Beginnings of the types of tools that the provider runs."""

StoredMessages = dict[str, list[Json]]
"""The messages up to each stored response of a session, by the response's id."""


class BlockRequest(CompletionOptions, ABC):
    """A request of one of these APIs."""

    not_translated: ClassVar[tuple[str, ...]] = ("n", "stream_options", "return_token_ids")

    @abstractmethod
    def to_chat(self, stored: StoredMessages | None, warned: set[str]) -> ChatRequest:
        """Return the equivalent chat request. `stored` is None without a session. Hosted tools warn once.

        Raise RequestError for a field that has no equivalent.
        """

    @abstractmethod
    def new_builder(self, stored: StoredMessages | None) -> "BlockBuilder":
        """Return the builder of the response."""

    def _translate(self, messages: Sequence[Json], tools: Sequence[Json], **fields: Any) -> ChatRequest:
        """Return the chat request with the fields that are the same in both APIs, and with `fields`."""
        self.check_offered()
        if self.n_choices > 1 or self.return_token_ids:
            name = "n" if self.n_choices > 1 else "return_token_ids"
            refuse(f"{name} is not supported here; remove it or use /v1/chat/completions", param=name)
        names = CompletionOptions.model_fields.keys() - self.not_translated
        same = self.model_dump(include=names, exclude_none=True)
        chat = {"messages": _join_system(messages), "tools": list(tools) or None, **fields}
        try:
            return ChatRequest.model_validate(same | chat)
        except ValidationError as error:
            raise invalid(error.errors()[0]) from error


def offer_tool(name: Any, description: Any, parameters: Any, strict: Any = None) -> Json:
    """Return a tool in the form of chat completions."""
    if not isinstance(name, str) or not name:
        refuse("a tool has no name", param="tools")
    fields = {"name": name, "description": description, "parameters": parameters, "strict": strict or None}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def check_hosted(kind: str, warned: set[str]) -> None:
    """Warn once that a tool is left out because the provider would run it. Refuse any other unknown type."""
    if not kind.startswith(HOSTED_TOOLS):
        refuse(f"tools of type {kind!r} are not supported; describe the tool as a function", param="tools")
    if kind not in warned:
        warned.add(kind)
        logger.warning("Requests offer the tool %r, which the provider would run. It is left out of the prompt.", kind)


def dump_parts(content: str | Sequence[ContentPart] | None) -> str | list[Json] | None:
    """Return a content as JSON."""
    if content is None or isinstance(content, str):
        return content
    return [part.model_dump(exclude_none=True) for part in content]


def _join_system(messages: Sequence[Json]) -> list[Json]:
    """Join the system messages at the start, as many templates write only one, and few know the role `developer`."""
    named = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    n_system = next((i for i, one in enumerate(named) if one["role"] != "system"), len(named))
    if n_system < 2:
        return named
    texts = [
        [{"type": "text", "text": content}] if isinstance(content := one["content"], str) else content or []
        for one in named[:n_system]
    ]
    joined = [part for text in texts for part in (*text, {"type": "text", "text": "\n\n"})][:-1]
    return [{"role": "system", "content": joined}, *named[n_system:]]


def seal_thought(thought: str) -> str:
    """Encode a thought as text that a client sends back but does not show."""
    return b64encode(thought.encode(errors="surrogatepass")).decode()


def open_thought(sealed: str, param: str) -> str:
    """Decode a thought. Raise RequestError if it is from another server."""
    try:
        return b64decode(sealed, validate=True).decode(errors="surrogatepass")
    except (binascii.Error, ValueError):
        refuse("a thought was encrypted by another server; remove it", param=param)


class BlockBuilder(ABC):
    """Writes replies as blocks. A stream opens, extends and closes one block after the other.

    A block has a kind and a value: `thought` and `text` have a text, and `call` has a call.
    """

    last_event: str | None = None

    def __init__(self) -> None:
        self._hex = uuid4().hex
        self._index = -1  # of the latest block
        self._kind: str | None = None  # of the open block
        self._text = ""  # of the open block
        self._is_truncated = False

    # -- the format of an API

    @abstractmethod
    def _body(self, finished: FinishedChoice, blocks: list[Json]) -> Json:
        """Return the body."""

    @abstractmethod
    def _block(self, index: int, kind: str, value: Any) -> Json:
        """Return a block."""

    @abstractmethod
    def _open(self, kind: str, value: Any) -> list[Json]:
        """Return the events that start the block at `_index`. `value` is an empty text or a call."""

    @abstractmethod
    def _extend(self, kind: str, value: Any) -> list[Json]:
        """Return the events that add a piece of text, or a whole call, to the block at `_index`."""

    @abstractmethod
    def _close(self, kind: str, value: Any) -> list[Json]:
        """Return the events that end the block at `_index`."""

    # -- the interface of `BodyBuilder`

    def complete(self, replies: Sequence[FinishedChoice]) -> Json:
        """Return the response as one body."""
        (finished,) = replies
        self._is_truncated = finished.is_truncated
        return self._body(finished, [self._block(i, *part) for i, part in enumerate(_parts(finished.reply))])

    def chunk(self, index: int, thought: str, content: str, tokens: TokenChunk | None = None) -> list[Json]:
        """Return the events for new text."""
        pieces = {"thought": thought, "text": content}
        return [event for kind, piece in pieces.items() if piece for event in self._add(kind, piece)]

    def end(self, index: int, thought: str, content: str, finished: FinishedChoice) -> list[Json]:
        """Return the events for the rest of the text and for the calls."""
        self._is_truncated = finished.is_truncated
        events = self.chunk(index, thought, content)
        if not (finished.reply.calls or finished.reply.content):
            events += self._add("text", "")
        events += self._end_block()
        for call in finished.reply.calls:
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


def _parts(reply: Reply) -> Iterable[tuple[str, str | ToolCall]]:
    """Yield the kinds and values of a reply's blocks. A reply without content and calls has an empty text."""
    if reply.thought:
        yield "thought", reply.thought
    if reply.content or not reply.calls:
        yield "text", reply.content
    yield from (("call", call) for call in reply.calls)
