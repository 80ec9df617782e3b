"""Parsing of tool calls in a model's reply.

One scan finds the thoughts and the calls of a reply. A call is parsed as a whole: a tag in a string of JSON or in the
value of a parameter is text. These formats have markers that no prose has, and are always recognized:

    <tool_call>{"name": "search", "arguments": {"query": "Mount Fuji"}}</tool_call>       `tagged`: Hermes, Qwen
    <function=search><parameter=query>Mount Fuji</parameter></function>                   `plain`: Qwen3-Coder
    <invoke name="search"><parameter name="query">Mount Fuji</parameter></invoke>         `plain`: MiniMax M2
    <tool_call>search<arg_key>query</arg_key><arg_value>Mount Fuji</arg_value></tool_call>  `plain`: GLM
    <|channel|>commentary to=functions.search<|message|>{"query": "Mount Fuji"}<|call|>   `harmony`: gpt-oss
    <|python_tag|>{"name": "search", "parameters": {"query": "Mount Fuji"}}               `llama`: Llama 3.1
    <|python_start|>[search(query="Mount Fuji")]<|python_end|>                            `llama`: Llama 4
    <｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "Mount Fuji"}<｜tool▁call▁end｜>        `deepseek`: V3, V3.1
    <|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "Mount Fuji"}<|tool_call_end|>
                                                                                          `kimi`: K2
    [TOOL_CALLS]search[ARGS]{"query": "Mount Fuji"}                                       `mistral`
    <|tool_call|>[{"name": "search", "arguments": {"query": "Mount Fuji"}}]               `mistral`: Granite, Phi-4

A reply may have several calls. The last one may lack its closing tag, because that tag is often the stop string, but
not the end of a value. Only calls after the last thought count.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.tools.calls.call import MalformedCall, ToolCall, ToolCallError
from skyrl_gym.tools.calls.deepseek import DEEPSEEK
from skyrl_gym.tools.calls.harmony import HARMONY, HEADER
from skyrl_gym.tools.calls.kimi import KIMI
from skyrl_gym.tools.calls.llama import LIST, LLAMA
from skyrl_gym.tools.calls.mistral import MISTRAL
from skyrl_gym.tools.calls.plain import FUNCTION, INVOKE, STRAY
from skyrl_gym.tools.calls.tagged import TAGGED

__all__ = [
    "THOUGHT_TAGS",
    "MalformedCall",
    "ToolCall",
    "ToolCallError",
    "find_call_start",
    "parse_arguments",
    "parse_tool_calls",
    "split_calls",
    "strip_thoughts",
]

MAX_CALLS = 32  # in one reply
START_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
THOUGHT_TAGS = {
    START_OF_THOUGHT: END_OF_THOUGHT,
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Tags around thoughts: of most models, Seed-OSS, Mistral and Command A."""
HARMONY_THOUGHT = {"<|channel|>analysis<|message|>": "<|end|>"}
"""Tokens around the thoughts of gpt-oss."""
_THOUGHTS = {**THOUGHT_TAGS, **HARMONY_THOUGHT}

_FORMATS = {
    "tagged": TAGGED,
    "plain": FUNCTION,
    "invoke": INVOKE,
    "harmony": HARMONY,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "mistral": MISTRAL,
}
_TOKEN = re.compile(
    f"(?P<thought>{'|'.join(map(re.escape, _THOUGHTS))})"
    f"|(?P<end_of_thought>{'|'.join(re.escape(tag) for tag in _THOUGHTS.values() if tag != '<|end|>')})"
    + "".join(f"|(?P<{name}>{form.opening})" for name, form in _FORMATS.items())
    + f"|(?P<header>{HEADER})|(?P<stray>{STRAY})"
)
_WRAPPER = re.compile(
    r"</?minimax:tool_call>|<｜tool▁calls▁(?:begin|end)｜>|<\|tool_calls_section_(?:begin|end)\|>"
    r"|<\|/tool_call\|>|<\|eom_id\|>|<\|python_(?:start|end)\|>"
)
"""Tags around the calls of a reply."""
_STARTS = (
    *("<tool_call>", "<function_call>", "<function=", '<invoke name="', "<minimax:tool_call>", "<|python_"),
    *("<｜tool▁call", "<|tool_call", "<|channel|>", "<|start|>", "[TOOL_CALLS]"),
)
"""Beginnings of all openings and wrappers. `find_call_start` searches for them."""
_TAG = "<|python_tag|>"
_BARE = re.compile(rf"\s*(?:<\|python_(?:start|end)\|>\s*)*(?=\{{|{LIST})")
"""Beginning of a reply of Llama 3.2 and 4, which leave the tag out."""

CUT_OFF = (
    "Your reply was cut off at the maximum number of tokens, so no tool calls were executed. Write a shorter reply."
)


@dataclass(slots=True)
class _Scan:
    """Result of a scan: text outside thoughts, calls, the first error, and the form of the last call.

    hidden: the spans of calls and headers, in order.
    """

    visible: list[str] = field(default_factory=list)
    hidden: list[tuple[int, int]] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    error: ToolCallError | None = None
    is_closed: bool = True
    is_plain: bool = False


def strip_thoughts(text: str) -> str:
    """Return the text after the last thought, without a final unfinished one. The prompt may have opened a thought.

    >>> strip_thoughts("<think>Six times seven.</think>It is 42.")
    'It is 42.'
    >>> strip_thoughts("Let me see. <think>Six times")
    'Let me see. '
    """
    return "".join(_scan(text).visible)


def parse_tool_calls(text: str, *, is_truncated: bool = False) -> list[ToolCall]:
    """Return the calls after the last complete thought, in order.

    Args:
        is_truncated: the reply ended at the maximum number of tokens. An unclosed last call is then an error.

    Raises:
        ToolCallError: a call cannot be parsed, or there are too many. Execute none of them.

    >>> parse_tool_calls('<tool_call>{"name": "search", "arguments": {"query": "Mount Fuji"}}</tool_call>')
    [ToolCall(name='search', arguments={'query': 'Mount Fuji'})]
    >>> parse_tool_calls("<function=add><parameter=a>2</parameter><parameter=b>3</parameter></function>")
    [ToolCall(name='add', arguments={'a': '2', 'b': '3'})]
    """
    return _checked_scan(text, is_truncated).calls


def split_calls(text: str, *, is_truncated: bool = False, is_bare: bool = False) -> tuple[str, list[ToolCall]]:
    """Return the text outside of calls, and the calls, as `parse_tool_calls` does. Text without calls is unchanged.

    Args:
        is_bare: a reply that starts with `{` or `[name(` consists of calls without a tag, as Llama 3.2 and 4 write
            them.

    >>> split_calls('I look.\\n<tool_call>{"name": "look"}</tool_call>')
    ('I look.', [ToolCall(name='look', arguments={})])
    """
    if is_bare and (start := _BARE.match(text)):
        text = _TAG + text[start.end() :]
    scan = _checked_scan(text, is_truncated)
    starts, ends = [0, *(end for _, end in scan.hidden)], [*(start for start, _ in scan.hidden), len(text)]
    pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    if scan.calls:
        pieces = [_WRAPPER.sub("", piece).rstrip() for piece in pieces]
    return "".join(pieces), scan.calls


def find_call_start(text: str) -> int:
    """Return the position from which the text is, or may become, a call. Without any, return the length.

    >>> find_call_start("I look.<tool_call>{"), find_call_start("I look.<tool"), find_call_start("1 < 2")
    (7, 7, 5)
    """
    for match in re.finditer(r"[<\[]|\A\s*to=", text):
        start = match.start()
        tail = text[start : start + 24]
        if any(tail.startswith(opening) or opening.startswith(tail) for opening in _STARTS) or "=" in match[0]:
            return start
    return len(text)


def _checked_scan(text: str, is_truncated: bool) -> _Scan:
    """Return the scan of a reply, or raise ToolCallError."""
    scan = _scan(text)
    if is_truncated and (scan.error is not None or not scan.is_closed):
        raise ToolCallError(CUT_OFF)
    if scan.error is not None:
        raise scan.error
    if len(scan.calls) > MAX_CALLS:
        raise ToolCallError(f"Your reply has more than {MAX_CALLS} tool calls.")
    return scan


def _scan(text: str) -> _Scan:
    """Find thoughts and calls in one pass from left to right.

    The prompt may have opened a thought, so the scan learns only at an end tag that everything before it was a thought.
    It then drops the text, calls and errors so far and continues with an empty result. A complete thought also discards
    everything before it. For example, in the reply

        I could <function=search> first.</think>Let me look.<tool_call>{"name": "search", …}</tool_call>

    `<function=search>` opens a malformed call, so the scan records an error. At `</think>` it drops the error, and one
    call remains. Without the `</think>`, the error would count.

    After a malformed call, the scan only looks for thoughts, because the malformed arguments may contain anything. A
    well-formed call is consumed as a whole, so a tag inside an argument is never mistaken for a call. The position only
    moves forward, so the time is linear in the length of the reply.
    """
    scan, start, position = _Scan(), 0, 0
    while token := _TOKEN.search(text, position):
        kind, position = token.lastgroup or "", token.end()
        if kind == "thought":
            closing = _THOUGHTS[token[0]]
            end = text.find(closing, position)
            if end < 0:
                scan.visible.append(text[start : token.start()])
                return scan
            scan, start = _Scan(), end + len(closing)
            position = start
        elif kind == "end_of_thought":  # the prompt opened the thought
            scan, start = _Scan(), position
        elif kind == "header":
            scan.visible.append(text[start : token.start()])
            scan.hidden.append(token.span())
            start = position
        elif scan.error is None:
            n_calls = len(scan.calls)
            position = _parse_at(text, token, scan)
            if len(scan.calls) > n_calls:
                scan.hidden.append((token.start(), position))
    scan.visible.append(text[start:])
    return scan


def _parse_at(text: str, token: re.Match[str], scan: _Scan) -> int:
    """Parse the calls at an opening tag, and return the position after them."""
    kind = token.lastgroup or ""
    if kind == "stray":
        if scan.is_plain:
            scan.error = ToolCallError(
                f"Unexpected {token[0]} after a call. A parameter value must not contain a closing tag of a call."
            )
        return token.end()
    try:
        parsed = _FORMATS[kind].parse(text, token.start(), token.end())
    except MalformedCall as error:
        scan.error = error
        return max(error.end, token.end())
    scan.calls += parsed.calls
    scan.is_closed, scan.is_plain = parsed.is_closed, parsed.is_plain
    return parsed.end


def parse_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a chat message with its tool calls' arguments as objects, as chat templates expect them.

    APIs and data sets often hold arguments as JSON strings, and no arguments as an empty string or null, or not at all.
    Any other string that is not a JSON object is left alone.
    """
    copy = dict(message)
    if isinstance(calls := copy.get("tool_calls"), list):
        copy["tool_calls"] = [_parse_call_arguments(call) for call in calls]
    return copy


def _parse_call_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    text = function.get("arguments")
    if not isinstance(text, str | None):
        return call
    try:
        arguments = json.loads((text or "").strip() or "{}")
    except (ValueError, RecursionError):
        return call
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        return call
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed
