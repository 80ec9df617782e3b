"""A tool call, and the code that its formats share."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from json import JSONDecodeError
from typing import Any, NamedTuple

from skyrl_gym.runtime.text import clean_strings, clean_text
from skyrl_gym.tools.strict_json import BadJSON, parse_json_at

_SPACE = re.compile(r"\s*")
_FORM = '{"name": …, "arguments": {…}}'
_OTHER_KEYS = frozenset(("name", "tool", "id", "type"))
"""Keys of a call without arguments. Any other key may hold arguments that the call would lose."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, e.g. `ToolCall("search", {"query": "Mount Fuji"})`. Plain-text formats give every argument as text."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str | None = field(default=None, compare=False, repr=False)  # as Kimi K2 and Mistral write it


class ToolCallError(ValueError):
    """A call that cannot be parsed. The message is for the model."""


class MalformedCall(ToolCallError):
    """A call that is malformed up to the position `end` of the reply."""

    def __init__(self, message: str, end: int) -> None:
        super().__init__(message)
        self.end = end


class Parsed(NamedTuple):
    """Calls in a reply.

    end: the position after them.
    is_closed: True unless the tag that closes them is missing.
    is_plain: True if their values are plain text.
    """

    calls: list[ToolCall]
    end: int
    is_closed: bool = True
    is_plain: bool = False


class Format(NamedTuple):
    """A call format: the regular expression of its opening tag, and the parser for the rest.

    The parser takes the reply and the positions of the start and the end of the opening. It raises MalformedCall.
    """

    opening: str
    parse: Callable[[str, int, int], Parsed]


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is not white space."""
    space = _SPACE.match(text, position)
    assert space is not None  # it may be empty
    return space.end()


def parse_json_in(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value after `start`, and the position after it. Tags in its strings are text."""
    body = text[start:]
    try:
        value, length = parse_json_at(body, skip_space(body, 0))
    except BadJSON as error:
        raise MalformedCall(f"The tool call is not valid JSON ({error}).", start + _bad_length(error, body)) from error
    return clean_strings(value), start + length


def _bad_length(error: BadJSON, body: str) -> int:
    """Return the length of malformed JSON. An unterminated string takes the rest of the reply."""
    cause = error.__cause__
    if not isinstance(cause, JSONDecodeError):
        return 0
    return len(body) if cause.msg.startswith("Unterminated string") else cause.pos


def parse_closing(text: str, start: int, closing: str) -> Parsed:
    """Return the position after the closing tag that must follow JSON. Only the end of the reply may replace it."""
    position = skip_space(text, start)
    if text.startswith(closing, position):
        return Parsed([], position + len(closing))
    if position < len(text) and not text.startswith("<|", position):
        raise MalformedCall(f"The tool call is not valid JSON: there is text between the JSON and {closing}.", position)
    return Parsed([], position, is_closed=False)


def to_call(value: Any, end: int) -> ToolCall:
    """Convert `{"name": …, "arguments": {…}}` to a call."""
    if not isinstance(value, dict):
        raise MalformedCall(f"A tool call is a JSON object: {_FORM}.", end)
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not name:
        raise MalformedCall('The tool call has no "name".', end)
    key = next((key for key in ("arguments", "parameters", "params") if key in value), None)
    if key is None and (unread := sorted(value.keys() - _OTHER_KEYS)):
        raise MalformedCall(f'The tool call {name} has no "arguments", but "{unread[0]}"; write {_FORM}.', end)
    return named_call(name, {} if key is None else value[key], end)


def named_call(name: str, arguments: Any, end: int, id: str | None = None) -> ToolCall:
    """Return a call with arguments that were parsed from JSON. Null means no arguments."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise MalformedCall(f'"arguments" of the tool call {name} must be a JSON object.', end)
    return ToolCall(clean_text(name), arguments, id)
