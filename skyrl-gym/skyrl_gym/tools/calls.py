"""Tool calls in what a model writes.

Two ways to write one, any number of times in a reply:

    <tool_call>{"name": "search", "arguments": {"query": "Mount Fuji"}}</tool_call>         Hermes, Qwen; JSON
    <function=search><parameter=query>Mount Fuji</parameter></function>                     Qwen3-Coder; plain text

`<function_call>` is read as `<tool_call>`, `tool` as `name`, and `parameters` or `params` as `arguments`. The last call
may lack its closing tag, which is often the stop string. Thoughts are not searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from skyrl_gym.tools.messages import readable
from skyrl_gym.tools.strict_json import BadJSON, read_json

OPENING = re.compile(r"<(tool_call|function_call)>|<function=([^<>\s]+)>")
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?")
MAX_CALLS = 32  # in one reply
END_OF_THOUGHT = "</think>"
START_OF_THOUGHT = "<think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, e.g. `ToolCall("search", {"query": "Mount Fuji"})`. Arguments of the plain syntax are all text."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ToolCallError(ValueError):
    """A call that cannot be read; the message is for the model."""


def without_thoughts(text: str) -> str:
    """What is said after the thoughts; nothing while the model is still thinking."""
    _, found, said = text.rpartition(END_OF_THOUGHT)
    if found:
        text = said
    return text.partition(START_OF_THOUGHT)[0]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a reply, in order.

    Raises:
        ToolCallError: one of them cannot be read, or there are too many, so that none should be carried out.
    """
    calls = list(islice(_calls(without_thoughts(text)), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        raise ToolCallError(f"Your reply has more than {MAX_CALLS} tool calls.")
    return calls


def _calls(text: str) -> Iterator[ToolCall]:
    position = 0
    while opening := OPENING.search(text, position):
        tag, function = opening.groups()
        if tag:
            body, position = _until(text, opening.end(), f"</{tag}>")
            yield _json_call(body)
        else:
            body, position = _until(text, opening.end(), "</function>")
            yield ToolCall(readable(function), _sound(_parameters(body)))


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """The text up to `closing`, and where to go on; without it, up to a special token or the end."""
    end = text.find(closing, start)
    return (text[start:].partition("<|")[0], len(text)) if end < 0 else (text[start:end], end + len(closing))


def _json_call(body: str) -> ToolCall:
    try:
        call = _sound(read_json(body))
    except BadJSON as error:
        raise ToolCallError(f"The tool call is not valid JSON ({error}).") from error
    if not isinstance(call, dict):
        raise ToolCallError('A tool call is a JSON object: {"name": …, "arguments": {…}}.')
    name = call.get("name", call.get("tool"))
    if not isinstance(name, str) or not name:
        raise ToolCallError('The tool call has no "name".')
    arguments: Any = next((call[key] for key in ("arguments", "parameters", "params") if key in call), {})
    if not isinstance(arguments, dict):
        raise ToolCallError(f'"arguments" of the tool call {name} must be a JSON object.')
    return ToolCall(name, arguments)


def _sound(value: Any) -> Any:
    """The same without halves of characters, which JSON can write and nobody can send."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {_sound(key): _sound(inner) for key, inner in value.items()}
    return [_sound(inner) for inner in value] if isinstance(value, list) else value


def _parameters(body: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    position = 0
    while opening := PARAMETER.search(body, position):
        value, position = _until(body, opening.end(), "</parameter>")
        found[opening[1]] = value.removesuffix("\n")
    return found
