"""Calls of DeepSeek V3 (fenced) and V3.1 (bare JSON).

<｜tool▁call▁begin｜>function<｜tool▁sep｜>search ```json {"query": "Mount Fuji"} ```<｜tool▁call▁end｜>

<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "Mount Fuji"}<｜tool▁call▁end｜>
"""

import re

from skyrl_gym.tools.calls.call import Format, MalformedCall, Parsed, named_call, parse_json_in, skip_space

_HEADER = re.compile(r"\s*(?:function<｜tool▁sep｜>([^\n<]+)\n```json\n|([^\s<]+)\s*<｜tool▁sep｜>)")
_END, _FENCE = "<｜tool▁call▁end｜>", "```"


def _parse(text: str, start: int, end: int) -> Parsed:
    header = _HEADER.match(text, end)
    if header is None:
        raise MalformedCall("The tool call has no name, or no JSON after it.", end)
    name = (header[1] or header[2]).strip()
    arguments, position = parse_json_in(text, header.end())
    call = named_call(name, arguments, position)
    position = skip_space(text, position)
    if header[1] and text.startswith(_FENCE, position):
        position = skip_space(text, position + len(_FENCE))
    if text.startswith(_END, position):
        return Parsed([call], position + len(_END))
    if position < len(text):
        raise MalformedCall(f"The call to {name} has text between its arguments and {_END}.", position)
    return Parsed([call], position, is_closed=False)


DEEPSEEK = Format(r"<｜tool▁call▁begin｜>", _parse)
