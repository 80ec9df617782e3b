"""Calls whose arguments are plain text between tags, as Qwen3-Coder, MiniMax M2 and GLM write them.

    <function=search>
    <parameter=query>
    Mount Fuji
    </parameter>
    </function>

    <invoke name="search">
    <parameter name="query">Mount Fuji</parameter>
    </invoke>

    <tool_call>search
    <arg_key>query</arg_key>
    <arg_value>Mount Fuji</arg_value>
    </tool_call>

A value ends with the first closing tag that the next parameter, the end of the call or the end of the reply follows, so
it may contain tags. Special tokens may end the reply. What remains ambiguous is an error: a truncated value would be a
call that the model did not write.
"""

import re
from typing import NamedTuple

from skyrl_gym.runtime.text import clean_strings, clean_text
from skyrl_gym.tools.calls.call import (
    Format,
    MalformedCall,
    Parsed,
    ToolCall,
    named_call,
    parse_closing,
    parse_json_in,
    skip_space,
)


class _Tags(NamedTuple):
    """The tags of a plain-text format.

    opening: the beginning of a parameter, with its `key`.
    inner: the same within a value, except in quotes.
    closing: the end of a value. `value_end` is a closing that does end one.
    end: the end of the call.
    """

    opening: re.Pattern[str]
    inner: re.Pattern[str]
    closing: str
    value_end: re.Pattern[str]
    end: re.Pattern[str]


def _tags(opening: str, newline: str, closing: str, end: str) -> _Tags:
    """Return the tags of a format that writes `newline` after an opening and before a closing tag."""
    return _Tags(
        re.compile(rf"\s*{opening}{newline}"),
        re.compile(rf"(?<!['\"`]){opening}"),
        closing,
        re.compile(rf"{newline}{closing}(?=\s*(?:{opening}|{end}|(?:<\|[^<>|]*\|>\s*)*\Z))"),
        re.compile(rf"\s*(?:{end})"),
    )


_QWEN = _tags(r"<parameter=(?P<key>[^<>\s]+)>", r"\n?", "</parameter>", "</function>|</tool_call>")
_MINIMAX = _tags(r'<parameter name="(?P<key>[^"<>]+)">', "", "</parameter>", "</invoke>|</minimax:tool_call>")
_GLM = _tags(r"<arg_key>(?P<key>[^<>]*)</arg_key>\s*<arg_value>", "", "</arg_value>", "</tool_call>|</function_call>")


def parse_function(text: str, start: int, end: int) -> Parsed:
    """Parse `<function=name>…</function>`. Llama 3.1 writes the arguments as JSON between these tags."""
    name = clean_text(text[start:end].removeprefix("<function=").removesuffix(">"))
    if text.startswith("{", skip_space(text, end)):
        arguments, position = parse_json_in(text, end)
        return parse_closing(text, position, "</function>")._replace(calls=[named_call(name, arguments, position)])
    return _parse_parameters(text, end, name, _QWEN)


def _parse_invoke(text: str, start: int, end: int) -> Parsed:
    name = clean_text(text[start:end].removeprefix('<invoke name="').removesuffix('">'))
    return _parse_parameters(text, end, name, _MINIMAX)


def parse_glm(text: str, start: int, name: str) -> Parsed:
    """Parse the arguments of a GLM call."""
    return _parse_parameters(text, start, name, _GLM)


def _parse_parameters(text: str, position: int, name: str, tags: _Tags) -> Parsed:
    """Parse parameters up to the end of the call.

    Nothing is escaped in these formats, so a value may contain its own closing tag. A closing tag ends the value only
    if the next parameter, the end of the call or the end of the reply follows. In

        <parameter=text>use </parameter> to close</parameter></function>

    " to close" follows the first `</parameter>`, so the value is "use </parameter> to close". A value that contains the
    start of a parameter is an error: the model may have forgotten a closing tag, or may quote one, and a wrong guess
    would execute a call that it did not write.
    """
    arguments: dict[str, str] = {}
    while opening := tags.opening.match(text, position):
        key, start = opening["key"].strip(), opening.end()
        is_cut_off = text.find(tags.closing, start) < 0  # much faster than the pattern
        closing = None if is_cut_off else tags.value_end.search(text, start)
        if closing is None:
            raise MalformedCall(
                f"The value of {key} in the call to {name} has no {tags.closing}, so it is cut off. Write it again.",
                start,
            )
        value = text[start : closing.start()]
        if inner := tags.inner.search(value):
            raise MalformedCall(
                f"The value of {key} in the call to {name} contains {inner[0]}. Close each value with {tags.closing}.",
                start,
            )
        if key in arguments:
            raise MalformedCall(f"The call to {name} has the parameter {key} twice.", closing.end())
        arguments[key] = value
        position = closing.end()
    call = ToolCall(name, clean_strings(arguments))
    if end := tags.end.match(text, position):
        return Parsed([call], end.end(), is_plain=True)
    position = skip_space(text, position)
    if position < len(text) and not text.startswith("<|", position):
        raise MalformedCall(f"The call to {name} has text outside its parameters.", position)
    return Parsed([call], position, is_closed=False, is_plain=True)


FUNCTION = Format(r"<function=[^<>\s]+>", parse_function)
INVOKE = Format(r'<invoke name="[^"<>]+">', _parse_invoke)
STRAY = r"</(?:parameter|function|arg_value|arg_key)>"
"""Tags left over when a value contained the end tag of a call."""
