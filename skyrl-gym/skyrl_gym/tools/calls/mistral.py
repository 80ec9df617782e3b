"""Calls of Mistral: a list as JSON, or names with arguments. Granite 3 and Phi-4-mini write such a list, too.

[TOOL_CALLS][{"name": "search", "arguments": {"query": "Mount Fuji"}}]
[TOOL_CALLS]search[ARGS]{"query": "Mount Fuji"}
<|tool_call|>[{"name": "search", "arguments": {"query": "Mount Fuji"}}]
"""

import re
from dataclasses import replace

from skyrl_gym.tools.calls.call import Format, MalformedCall, Parsed, named_call, parse_json_in, skip_space, to_call

_NAME = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([^\s\[\]]*))?(?:\[ARGS\]|(?=\{))")


def _parse(text: str, start: int, end: int) -> Parsed:
    if name := _NAME.match(text, end):
        arguments, position = parse_json_in(text, name.end())
        return Parsed([named_call(name[1], arguments, position, name[2])], position)
    values, position = parse_json_in(text, skip_space(text, end))
    if not isinstance(values, list):
        raise MalformedCall('Tool calls are a JSON list: [{"name": …, "arguments": {…}}].', position)
    calls = [to_call(value, position) for value in values]
    ids = [value.get("id") for value in values]
    return Parsed([replace(call, id=id) for call, id in zip(calls, ids, strict=True)], position)


MISTRAL = Format(r"\[TOOL_CALLS\]|<\|tool_call\|>", _parse)
