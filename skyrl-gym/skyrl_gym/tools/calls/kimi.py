"""Calls of Kimi K2. The name is between a prefix and the call's index.

<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "Mount Fuji"}<|tool_call_end|>
"""

import re

from skyrl_gym.tools.calls.call import Format, MalformedCall, Parsed, named_call, parse_closing, parse_json_in

_HEADER = re.compile(r"\s*((?:functions\.)?([^\s<]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>")


def _parse(text: str, start: int, end: int) -> Parsed:
    header = _HEADER.match(text, end)
    if header is None:
        raise MalformedCall("The tool call has no name, or no <|tool_call_argument_begin|> after it.", end)
    arguments, position = parse_json_in(text, header.end())
    call = named_call(header[2], arguments, position, header[1])
    return parse_closing(text, position, "<|tool_call_end|>")._replace(calls=[call])


KIMI = Format(r"<\|tool_call_begin\|>", _parse)
