from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
from gym_kit.messages import call
from gym_kit.texts import JSON_VALUES, linear_time, long_text
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_arguments, parse_tool_calls, strip_thoughts

SEARCH = ToolCall("search", {"query": "Mount Fuji"})
JSON_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Mount Fuji"}}\n</tool_call>'
PLAIN_CALL = "<function=search>\n<parameter=query>\nMount Fuji\n</parameter>\n</function>"


def write_parameters(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call of Qwen3-Coder."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}</function>"


def write_glm(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call of GLM."""
    parameters = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{parameters}</tool_call>"


WRITERS: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "tagged": lambda name, arguments: f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>",
    "harmony": lambda name, arguments: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    ),
    "llama": lambda name, arguments: f"<|python_tag|>{json.dumps({'name': name, 'parameters': arguments})}<|eom_id|>",
    "kimi": lambda name, arguments: (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
    ),
    "deepseek": lambda name, arguments: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek 3.1": lambda name, arguments: (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
    ),
    "mistral": lambda name, arguments: f"[TOOL_CALLS]{json.dumps([{'name': name, 'arguments': arguments}])}",
    "mistral names": lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}",
    "qwen3 coder": write_parameters,
    "qwen3 coder tagged": lambda name, arguments: f"<tool_call>\n{write_parameters(name, arguments)}\n</tool_call>",
    "glm": write_glm,
}
"""Writers of the formats with markers, which other code than the parser's defines."""
PLAIN = ("qwen3 coder", "qwen3 coder tagged", "glm")
TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "</parameter>",
    "</function>",
    "<|call|>",
    "[ARGS]",
    "\n",
    "```",
)
tagged_texts = st.lists(st.sampled_from(TAGS) | st.text(max_size=4), max_size=6).map("".join)
names = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)


@pytest.mark.parametrize(
    "text",
    [
        JSON_CALL,
        PLAIN_CALL,
        "I will search.\n" + JSON_CALL + "\n",
        JSON_CALL.removesuffix("\n</tool_call>"),
        JSON_CALL.removesuffix("</tool_call>") + "<|im_end|>",
        PLAIN_CALL.removesuffix("</function>"),
        PLAIN_CALL.removesuffix("</function>") + "<|im_end|>",
        f"<tool_call>\n{PLAIN_CALL}\n</tool_call>",
        f"<tool_call>\n{PLAIN_CALL.removesuffix('</function>')}</tool_call>",
        '<function=search>{"query": "Mount Fuji"}</function>',
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Mount Fuji</arg_value>\n</tool_call>",
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>Mount Fuji</arg_value>\n",
        '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "Mount Fuji"}<|call|>',
        '<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"query": "Mount Fuji"}',
        ' to=functions.search<|channel|>commentary <|constrain|>json<|message|>{"query": "Mount Fuji"}<|call|>',
        "<|channel|>analysis<|message|>I call to=functions.etna.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.search <|constrain|>json<|message|>{"query": "Mount Fuji"}<|call|>',
        '<|python_tag|>{"name": "search", "parameters": {"query": "Mount Fuji"}}<|eom_id|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        '{"query": "Mount Fuji"}<|tool_call_end|><|tool_calls_section_end|>',
        '<|tool_call_begin|>search<|tool_call_argument_begin|>{"query": "Mount Fuji"}',
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        '{"query": "Mount Fuji"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "Mount Fuji"}<｜tool▁call▁end｜>',
        '[TOOL_CALLS][{"name": "search", "arguments": {"query": "Mount Fuji"}}]',
        '[TOOL_CALLS]search[ARGS]{"query": "Mount Fuji"}',
        '[TOOL_CALLS]search[CALL_ID]a1B2c3[ARGS]{"query": "Mount Fuji"}</s>',
        "[THINK]" + JSON_CALL.replace("Fuji", "Etna") + "[/THINK]" + JSON_CALL,
        JSON_CALL.replace("tool_call", "function_call"),
        JSON_CALL.replace("arguments", "parameters"),
        JSON_CALL.replace("arguments", "params").replace('"name"', '"tool"'),
        "<think>" + JSON_CALL.replace("Fuji", "Etna") + "</think>" + JSON_CALL,
        "thoughts the prompt began" + JSON_CALL.replace("Fuji", "Etna") + "</think>" + JSON_CALL,
    ],
)
def test_ways_to_write_a_call(text: str) -> None:
    assert parse_tool_calls(text) == [SEARCH]


@pytest.mark.parametrize(
    "text",
    [
        *("", "no call", "<think>" + JSON_CALL, "</tool_call>", '{"name": "search"}', "<tool_calls>{}</tool_calls>"),
        *("search(query='Mount Fuji')", "[search(query='Mount Fuji')]", "A list: [1, 2].", "</function>", "[ARGS]{}"),
        *("<|channel|>analysis<|message|>" + JSON_CALL, "<|channel|>final<|message|>to=functions.search {}"),
        *("I write <tool_call> …</think>4", "I write <function=bash><parameter=x> …</think>4", "[THINK]" + JSON_CALL),
    ],
)
def test_no_call(text: str) -> None:
    assert parse_tool_calls(text) == []


def test_several_calls_in_both_formats() -> None:
    assert parse_tool_calls(JSON_CALL + PLAIN_CALL + JSON_CALL) == [SEARCH] * 3
    assert parse_tool_calls(f"<tool_call>{PLAIN_CALL}\n{PLAIN_CALL}</tool_call>{PLAIN_CALL}") == [SEARCH] * 3
    body = '{"name": "search", "parameters": {"query": "Mount Fuji"}}'
    for separator in (";", "; ", "\n", "\n\n", ""):
        assert parse_tool_calls(f"<|python_tag|>{body}{separator}{body}<|eom_id|>") == [SEARCH] * 2
    assert parse_tool_calls('<tool_call>{"name": "list", "arguments": null}</tool_call>') == [ToolCall("list")]
    text = (
        "<function=python>\n<parameter=code>\nif x:\n    print(x)\n\n</parameter><parameter=n>3</parameter></function>"
    )
    assert parse_tool_calls(text) == [ToolCall("python", {"code": "if x:\n    print(x)\n", "n": "3"})]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bash", {"command": "grep -n '</think>' chat.py"}),
        ("bash", {"command": "grep '<think>' a.py"}),
        ("edit", {"path": "a.md", "text": "a block ends with </tool_call> here"}),
        ("edit", {"path": "a.md", "text": "<tool_call>{}</tool_call>"}),
        ("edit", {"text": "\nA block ends with </parameter> here.\nSecond line.\n"}),
        ("edit", {"text": "A call ends with </function> here.\nSecond line."}),
        ("edit", {"text": "Ends with </parameter>"}),
        ("bash", {"command": "grep '<parameter=x>' a.py && grep \"<tool_call>\" b.py"}),
        ("edit", {"text": "<|im_end|> and [TOOL_CALLS] and </arg_value> here"}),
    ],
)
def test_tags_in_arguments_are_text(name: str, arguments: dict[str, str]) -> None:
    for form in WRITERS:
        assert parse_tool_calls("I edit.\n" + WRITERS[form](name, arguments) + "\n") == [ToolCall(name, arguments)], (
            form
        )
        text = WRITERS["tagged"](name, arguments)
        assert strip_thoughts("<think>a</think>" + text) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<function=bash>\n<parameter=command>\nrm -rf /tmp/build", "command in the call of bash has no </parameter>"),
        ("<function=bash>\n<parameter=command>\nls\n</function>", "has no </parameter>"),
        (
            "<function=bash>\n<parameter=command>\nls\n<parameter=timeout>\n10\n</parameter>\n</function>",
            "contains <par",
        ),
        ("<function=bash><parameter=a>1</parameter><parameter=a>2</parameter></function>", "has the parameter a twice"),
        ("<tool_call><function=bash></function><function=bash><parameter=a>", "has no </parameter>"),
        ("<function=bash>ls</function>", "has text outside of its parameters"),
        (
            "<function=edit><parameter=t>a</parameter></function>b</parameter></function>",
            "There is a </parameter> after",
        ),
        ("<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>rm -rf /tmp/build", "has no </arg_value>"),
        (
            "<tool_call>bash<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key><arg_value>2</arg_value>",
            "contains <arg_key>",
        ),
        ('<tool_call>{"name": "bash", "arguments": {"command": "grep \'</think>\' a.py', "Unterminated string"),
        ('<tool_call>{"name": "search"} and so on</tool_call>', "there is text between the JSON and </tool_call>"),
        ('<|channel|>commentary to=functions.bash<|message|>{"command": "rm -rf /tmp/bu', "Unterminated string"),
        ('<|python_tag|>{"name": "bash", "parameters": {"command"', "not valid JSON"),
        ("<|python_tag|>print(1)", "not valid JSON"),
        ('<|python_tag|>{"name": "bash"}\n{"name": "bash", "para', "Unterminated string"),
        ("<|tool_call_begin|>functions.bash:0<|tool_ca", "has no name"),
        ('<|tool_call_begin|>bash:0<|tool_call_argument_begin|>{"command": "rm', "Unterminated string"),
        ("<｜tool▁call▁begin｜>bash", "has no name, or no JSON"),
        ('<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "rm', "Unterminated string"),
        ('[TOOL_CALLS]bash[ARGS]{"command": "rm', "Unterminated string"),
        ('[TOOL_CALLS]{"name": "bash"}', "Tool calls are a JSON list"),
    ],
)
def test_a_call_that_is_cut_off_or_ambiguous_is_refused(text: str, message: str) -> None:
    with pytest.raises(ToolCallError, match=re.escape(message)):
        parse_tool_calls(JSON_CALL + text)


def test_a_truncated_reply_has_no_open_call() -> None:
    open_calls = [JSON_CALL.removesuffix("</tool_call>"), PLAIN_CALL.removesuffix("</function>"), "<tool_call>{"]
    for text in open_calls:
        with pytest.raises(ToolCallError, match="was cut off at the maximum number of tokens, and no call was carried"):
            parse_tool_calls(JSON_CALL + text, is_truncated=True)
    for text in (JSON_CALL, PLAIN_CALL, JSON_CALL + "and so on", "<think>" + open_calls[0], ""):
        assert parse_tool_calls(text, is_truncated=True) == parse_tool_calls(text)


def test_lone_surrogates_are_replaced() -> None:
    (one,) = parse_tool_calls('<tool_call>{"name": "search", "arguments": {"q": ["\\ud83d"]}}</tool_call>')
    assert one.arguments == {"q": ["?"]}
    assert parse_tool_calls('<tool_call>{"name": "\\ud83d"}</tool_call><function=\ud83d>') == [ToolCall("?")] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", r"not valid JSON \(error at line 1, column 1: Expecting value\)"),
        ('{"name": "search"', "not valid JSON"),
        ("[1]", "is a JSON object"),
        ('"search"', "is a JSON object"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "search", "arguments": [1]}', '"arguments" of the tool call search must be a JSON object'),
        ('{"name": "search", "arguments": {"n": NaN}}', "it contains an invalid number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"name": "\\ud83d", "arguments": 3}', r"of the tool call \? must be"),
    ],
)
def test_malformed_call_is_explained(body: str, message: str) -> None:
    with pytest.raises(ToolCallError, match=message):
        parse_tool_calls(f"{JSON_CALL}<tool_call>{body}</tool_call>")


@settings(max_examples=50)
@given(st.lists(st.tuples(names, st.dictionaries(names, JSON_VALUES, max_size=3)), max_size=3))
def test_round_trip(calls: list[tuple[str, dict[str, Any]]]) -> None:
    written = [call(name, **arguments) for name, arguments in calls if name not in arguments]
    assert parse_tool_calls("\n".join(written)) == [
        ToolCall(name, arguments) for name, arguments in calls if name not in arguments
    ]


@pytest.mark.parametrize("form", sorted(WRITERS.keys() - set(PLAIN)))
@settings(max_examples=40)
@given(calls=st.lists(st.tuples(names, st.dictionaries(names, JSON_VALUES | tagged_texts, max_size=3)), max_size=3))
def test_round_trip_of_json_formats(form: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    text = "\n".join(WRITERS[form](name, arguments) for name, arguments in calls)
    assert parse_tool_calls(text) == [ToolCall(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize("form", PLAIN)
@settings(max_examples=100)
@given(name=names, arguments=st.dictionaries(names, tagged_texts, max_size=3))
def test_round_trip_of_plain_formats(form: str, name: str, arguments: dict[str, str]) -> None:
    """A value is never changed: it arrives as written, or the call is refused."""
    text = WRITERS[form](name, arguments)
    if any(tag in value for value in arguments.values() for tag in ("</parameter>", "</function>", "</tool_call>")):
        with suppress(ToolCallError):
            assert parse_tool_calls(text)[0] == ToolCall(name, arguments)
    else:
        assert parse_tool_calls(text) == [ToolCall(name, arguments)]


@given(
    st.text()
    | tagged_texts
    | st.lists(st.sampled_from([JSON_CALL, "<tool_call>", "</tool_call>", "<function=f>", "</think>"])).map("".join)
)
def test_any_text_can_be_parsed_or_raises_tool_call_error(text: str) -> None:
    with suppress(ToolCallError):
        assert all(call.name for call in parse_tool_calls(text))


@pytest.mark.parametrize(
    "unit",
    [
        *("<tool_call>", "<function=f>", "<parameter=p>", "<think>", "</think>", "<function=f><parameter=p>", "{", "["),
        *("<function=f><parameter=p></think>", "<tool_call></think>", "</parameter>", "<tool_call>f<arg_key>", " "),
        *(
            "<function=f><parameter=p>x</parameter> ",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "<|channel|>commentary to=functions.f",
        ),
        *(
            "<|channel|>",
            "<｜tool▁call▁begin｜>",
            "<|tool_call_begin|>",
            "<|tool_call_begin|>f:0",
            '<|python_tag|>{"name": "f"}',
            " to=functions.f",
            "<function=f></function>",
            "<tool_call><function=f></function><function=f></function>",
            '<tool_call>{"name": "f"}</tool_call>',
            "[f(",
        ),
    ],
)
def test_parsing_is_linear(unit: str) -> None:
    with linear_time(), suppress(ToolCallError):
        parse_tool_calls(long_text(unit))


@pytest.mark.parametrize("text", ["[1]", '{"city": "Par', "[" * 100_000], ids=["list", "cut off", "deep"])
def test_arguments_that_are_no_json_object_stay_text(text: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}
    assert parse_arguments(message) == message


def test_thoughts() -> None:
    assert strip_thoughts("<think>a</think>b") == "b"
    assert strip_thoughts("a</think>b<think>c") == "b"
    assert strip_thoughts("<think>a") == ""
    assert strip_thoughts("b") == "b"
    assert strip_thoughts("a<think>b</think>c<think>d</think>e") == "e"
    assert strip_thoughts("a<think>b</think>c<think>d") == "c"
    assert strip_thoughts("<think>a<think>b</think>c</think>d") == "d"
    assert strip_thoughts("[THINK]a[/THINK]b") == strip_thoughts("<thinking>a</thinking>b") == "b"
    harmony = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    assert strip_thoughts(harmony) == "b"
