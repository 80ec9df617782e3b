"""Replies of the endpoint: the text of sampled tokens, divided into thought, content and tool calls.

    <think>The sum is missing.</think>I look.<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>
    ──────── thought ─────────────────content──────────────────────────── call ────────────────────────────────────

The chat template determines the tags of thoughts, and `skyrl_gym.tools.calls` has the formats of calls. Calls are
parsed only if the request offers tools.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCall, ToolCallError, find_call_start, split_calls
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import StopReason

Decode = Callable[[Sequence[int]], str]

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded text of an incomplete UTF-8 character
CALL_ID_LENGTH = 9  # Mistral's templates accept no other


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply, up to the stop string that ended it. Without a thought and calls, `content` is all of its text."""

    content: str
    thought: str = ""
    calls: Sequence[ToolCall] = ()  # with ids
    is_malformed: bool = False  # it has calls that cannot be parsed, so they are in `content`
    stop: str | None = None  # the stop string that ended it

    def to_message(self) -> dict[str, Any]:
        """Return the reply in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        thought = {"reasoning_content": self.thought} if self.thought else {}
        return message | {"refusal": None} | thought | ({"tool_calls": self.wire_calls()} if self.calls else {})

    def wire_calls(self) -> list[dict[str, Any]]:
        """Return the calls in OpenAI's format, with arguments as JSON text."""
        return [wire_call(call.id, call.name, dump_arguments(call)) for call in self.calls]


def wire_call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's chat format."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def dump_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON."""
    return json.dumps(call.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to divide the replies to a request. The default keeps all text as content."""

    thought_tags: Mapping[str, str] = field(default_factory=dict)  # opening and closing
    open_tag: str | None = None  # opening tag of the thought that the prompt has opened
    has_channels: bool = False  # True for gpt-oss, whose content has headers
    tools: Mapping[str, Mapping[str, Any]] | None = None  # JSON Schema of each tool's arguments. None: no tools
    calls_are_bare: bool = False  # see `split_calls`
    max_calls: int | None = None  # 1 without parallel calls

    def split(self, text: str, *, is_truncated: bool, seed: int) -> Reply:
        """Divide a whole reply. `seed` is the seed that it was sampled with. It determines the ids of the calls."""
        opening = self.find_opening(text)
        if opening is None:
            thought, content = "", text
        else:
            thought, _, content = text.lstrip().removeprefix(opening).partition(self.thought_tags[opening])
            thought, content = thought.strip(), content.lstrip()
        if self.tools is None and not self.has_channels:
            return Reply(content, thought)
        try:
            visible, calls = split_calls(content, is_truncated=is_truncated, is_bare=self.calls_are_bare)
        except ToolCallError:
            return Reply(content, thought, is_malformed=self.tools is not None)
        if self.tools is None:
            return Reply(content if calls else visible, thought)
        calls = calls[: self.max_calls]
        ids = [call.id for call in calls]
        if None in ids or len(set(ids)) < len(ids):
            ids = [blake2b(f"{seed}/{index}".encode()).hexdigest()[:CALL_ID_LENGTH] for index in range(len(calls))]
        arguments = [convert_arguments(call.arguments, self.tools.get(call.name, {})) for call in calls]
        parts = zip(calls, ids, arguments, strict=True)
        return Reply(visible, thought, [replace(call, id=id, arguments=values) for call, id, values in parts])

    def find_opening(self, text: str) -> str | None:
        """Return the opening tag of the thought that a reply starts with, or None."""
        return next((tag for tag in self.thought_tags if text.lstrip().startswith(tag)), self.open_tag)


def find_stop(decode: Decode, result: EngineResult, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the stop string that ended a reply, and the string."""
    if not stops or result.stop_reason != StopReason.STOP:
        return None
    text = decode(result.token_ids)
    n_before = len(decode(result.token_ids[:-1]).rstrip(INCOMPLETE))  # the last token completed the stop string
    found = [(text.find(stop, max(0, n_before - len(stop) + 1)), stop) for stop in stops]
    return min((one for one in found if one[0] >= 0), default=None, key=lambda one: one[0])


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
        self.stop: str | None = None  # the stop string that ended the reply, set by `finish`

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
        whole = self._decode(result.token_ids)
        start, self.stop = find_stop(self._decode, result, self._stops) or (len(whole), None)
        whole = whole if self._keeps_stop else whole[:start]
        return self._emit(whole[len(self.text) :] if whole.startswith(self.text) else "")

    def _emit(self, piece: str) -> str:
        self._pending = self._pending[len(piece) :]
        self.text += piece
        return piece


class ReplyStream:
    """Divides a reply while it is sampled, into pieces that add up to the parts of the whole reply.

    It holds back text that may become a tag or a call, and white space that may end a part. A call is returned by
    `finish`, as a whole.
    """

    def __init__(self, text: TextStream, form: ReplyFormat) -> None:
        self._text, self._form = text, form
        self._closing: str | None = None  # tag that ends the current thought
        self._is_started = not form.thought_tags
        self._is_trimmed = False  # True at the beginning of a thought, and of the content after it
        self._pending = ""
        self._sent = ["", ""]  # thought and content

    def push(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """Return the new text of the thought and of the content that later tokens can no longer change."""
        self._pending += self._text.push(token_ids)
        thought = ""
        if not self._is_started:
            start, tags = self._pending.lstrip(), self._form.thought_tags
            opening = self._form.find_opening(start)
            if not start or (start not in tags and any(tag.startswith(start) for tag in tags)):
                return "", ""
            self._is_started = True
            if opening is not None:
                self._pending, self._closing = start.removeprefix(opening), tags[opening]
                self._is_trimmed = True
        if self._closing is not None:
            inside, found, rest = self._pending.partition(self._closing)
            self._pending = inside
            thought = self._take(0, len(inside) if found else _certain_length(inside, self._closing))
            if not found:
                return thought, ""
            self._pending, self._closing, self._is_trimmed = rest, None, True
        if self._form.tools is None and not self._form.has_channels:
            return thought, self._take(1, len(self._pending), keeps_space=True)
        is_call = self._form.calls_are_bare and not self._sent[1] and self._pending.lstrip().startswith(("{", "["))
        return thought, self._take(1, 0 if is_call else find_call_start(self._pending))

    def finish(self, result: EngineResult, seed: int) -> tuple[str, str, Reply]:
        """Return the remaining text of the thought and of the content, and the whole reply."""
        self._text.finish(result)
        reply = self._form.split(self._text.text, is_truncated=result.stop_reason != StopReason.STOP, seed=seed)
        sent_thought, sent_content = self._sent
        thought = reply.thought[len(sent_thought) :] if reply.thought.startswith(sent_thought) else ""
        content = reply.content[len(sent_content) :] if reply.content.startswith(sent_content) else ""
        return thought, content, replace(reply, stop=self._text.stop)

    def _take(self, part: int, n_certain: int, *, keeps_space: bool = False) -> str:
        """Take up to `n_certain` characters of the pending text as a piece of a part."""
        if self._is_trimmed:
            n_space = len(self._pending) - len(self._pending.lstrip())
            self._pending, n_certain = self._pending[n_space:], max(0, n_certain - n_space)
            self._is_trimmed = not self._pending
        piece = self._pending[:n_certain]
        piece = piece if keeps_space else piece.rstrip()
        self._pending = self._pending[len(piece) :]
        self._sent[part] += piece
        return piece


def _certain_length(text: str, tag: str) -> int:
    """Return the length of the text before an end that may be the beginning of `tag`."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return len(text) - next((n for n in lengths if text.endswith(tag[:n])), 0)
