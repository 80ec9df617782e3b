"""Parsing of tool calls in a model's reply.

There are two formats, and a reply may have several calls:

    <tool_call>{"name": "search", "arguments": {"query": "Mount Fuji"}}</tool_call>         Hermes, Qwen; JSON
    <function=search><parameter=query>Mount Fuji</parameter></function>                     Qwen3-Coder; plain text

`<function_call>` is an alias of `<tool_call>`, `tool` of `name`, and `parameters` and `params` of `arguments`. The last
call may lack its closing tag, which is often the stop string. Calls inside thoughts are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from skyrl_gym.runtime.text import clean_strings, clean_text
from skyrl_gym.tools.strict_json import BadJSON, parse_json

OPENING = re.compile(r"<(tool_call|function_call)>|<function=([^<>\s]+)>")
PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?")
MAX_CALLS = 32  # in one reply
END_OF_THOUGHT = "</think>"
START_OF_THOUGHT = "<think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, e.g. `ToolCall("search", {"query": "Mount Fuji"})`. Arguments of the plain-text format are all text."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


class ToolCallError(ValueError):
    """A call that cannot be parsed; the message is for the model."""


def strip_thoughts(text: str) -> str:
    """Return the text after the thoughts; empty if a thought is not closed."""
    return text.rpartition(END_OF_THOUGHT)[2].partition(START_OF_THOUGHT)[0]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls in a reply, in order.

    Raises:
        ToolCallError: a call cannot be parsed, or there are too many; then no call should be executed.
    """
    calls = list(islice(_calls(strip_thoughts(text)), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        raise ToolCallError(f"Your reply has more than {MAX_CALLS} tool calls.")
    return calls


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a chat message whose tool calls have their arguments as objects, as chat templates expect them.

    APIs and data sets often hold arguments as JSON text. Text that is not a JSON object is left as it is.
    """
    copy = dict(message)
    if isinstance(calls := copy.get("tool_calls"), list):
        copy["tool_calls"] = [_parse_arguments(call) for call in calls]
    return copy


def _parse_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def _calls(text: str) -> Iterator[ToolCall]:
    position = 0
    while opening := OPENING.search(text, position):
        tag, function = opening.groups()
        if tag:
            body, position = _until(text, opening.end(), f"</{tag}>")
            yield _json_call(body)
        else:
            body, position = _until(text, opening.end(), "</function>")
            yield ToolCall(clean_text(function), clean_strings(_parameters(body)))


def _until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Return the text up to `closing`, or else up to a special token or the end, and the position after it."""
    end = text.find(closing, start)
    return (text[start:].partition("<|")[0], len(text)) if end < 0 else (text[start:end], end + len(closing))


def _json_call(body: str) -> ToolCall:
    try:
        call = clean_strings(parse_json(body))
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


def _parameters(body: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    position = 0
    while opening := PARAMETER.search(body, position):
        value, position = _until(body, opening.end(), "</parameter>")
        parameters[opening[1]] = value.removesuffix("\n")
    return parameters
