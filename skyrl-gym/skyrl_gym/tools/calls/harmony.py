"""Calls in the harmony format of gpt-oss.

    <|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "Mount Fuji"}<|call|>

The recipient may also come before the channel: `<|start|>assistant to=functions.search<|channel|>commentary …`. The
prompt ends with `<|start|>assistant`, so a reply may start with the recipient. Models also write recipients without
`functions.`, such as `to=python`. Those are calls, too.
"""

import re

from skyrl_gym.tools.calls.call import Format, Parsed, named_call, parse_closing, parse_json_in, skip_space

_NAME = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_END = "<|call|>"
_TO = r"\s+to=[^\s<]+\s*"
_FORMAT = r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"


def _parse(text: str, start: int, end: int) -> Parsed:
    name = _NAME.search(text, start, end)
    assert name is not None  # of the opening tag
    is_empty = text.startswith(_END, skip_space(text, end))
    arguments, position = ({}, end) if is_empty else parse_json_in(text, end)
    call = named_call(name[1], arguments, position)
    return parse_closing(text, position, _END)._replace(calls=[call])


HARMONY = Format(
    rf"(?:<\|start\|>assistant)?<\|channel\|>\w+{_TO}{_FORMAT}|(?:<\|start\|>assistant|\A){_TO}<\|channel\|>\w+{_FORMAT}",
    _parse,
)
HEADER = r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>|<\|return\|>"
"""Tokens around text that is not a call."""
