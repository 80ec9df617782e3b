"""Calls between `<tool_call>` tags: JSON (Hermes, Qwen), or the formats of Qwen3-Coder and GLM.

    <tool_call>{"name": "search", "arguments": {"query": "Mount Fuji"}}</tool_call>

Aliases: `<function_call>` for `<tool_call>`, `tool` for `name`, `parameters` and `params` for `arguments`.
"""

import re

from skyrl_gym.tools.calls.call import Format, Parsed, ToolCall, parse_closing, parse_json_in, to_call
from skyrl_gym.tools.calls.plain import FUNCTION, parse_function, parse_glm

_FUNCTION = re.compile(rf"\s*({FUNCTION.opening})")
_GLM_NAME = re.compile(r"\s*([A-Za-z_][\w.:/-]*)\s*(?=<arg_key>|</tool_call>|</function_call>)")


def _parse(text: str, start: int, end: int) -> Parsed:
    closing = f"</{text[start + 1 : end]}"
    calls: list[ToolCall] = []
    while function := _FUNCTION.match(text, end):  # one pair of tags may hold several functions
        parsed = parse_function(text, function.start(1), function.end())
        calls += parsed.calls
        end = parsed.end
        if text.startswith(closing, end - len(closing)):  # in place of </function>
            return parsed._replace(calls=calls)
    if calls:
        return parse_closing(text, end, closing)._replace(calls=calls, is_plain=parsed.is_plain)
    if glm := _GLM_NAME.match(text, end):
        return parse_glm(text, glm.end(), glm[1])
    value, position = parse_json_in(text, end)
    call = to_call(value, position)
    return parse_closing(text, position, closing)._replace(calls=[call])


TAGGED = Format(r"<(?:tool_call|function_call)>", _parse)
