import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_kit.texts import JSON_VALUES, linear_time, long_text
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_gym.tools.calls import (
    ToolCall,
    ToolCallError,
    find_call_start,
    parse_arguments,
    parse_tool_calls,
    split_calls,
    strip_thoughts,
)

REPLIES = yaml.safe_load(Path(__file__).with_name("calls.yaml").read_text(encoding="utf-8"))
SEARCH = ToolCall("search", {"query": "Mount Fuji"})
JSON_CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Mount Fuji"}}\n</tool_call>'
PLAIN_CALL = "<function=search>\n<parameter=query>\nMount Fuji\n</parameter>\n</function>"


def write_python(name: str, arguments: Mapping[str, Any]) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|python_start|>[{name}({written})]<|python_end|>"


def write_parameters(name: str, arguments: Mapping[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<function={name}>\n{parameters}</function>"


def write_glm(name: str, arguments: Mapping[str, Any]) -> str:
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
    "llama 4": write_python,
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
    "minimax": lambda name, arguments: "".join(
        [
            f'<minimax:tool_call>\n<invoke name="{name}">\n',
            *(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments.items()),
            "</invoke>\n</minimax:tool_call>",
        ]
    ),
}
"""Writers of the formats with markers, which other code than the parser's defines."""
PLAIN = ("qwen3 coder", "qwen3 coder tagged", "glm", "minimax")
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


@pytest.mark.parametrize("text", REPLIES["one call of search"])
def test_ways_to_write_a_call(text: str) -> None:
    assert parse_tool_calls(text) == [SEARCH]


@pytest.mark.parametrize("text", REPLIES["no call"])
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


@pytest.mark.parametrize("written", REPLIES["tags in arguments"])
def test_tags_in_arguments_are_text(written: dict[str, Any]) -> None:
    name, arguments = written["name"], written["arguments"]
    for form, write in WRITERS.items():
        assert parse_tool_calls(f"I edit.\n{write(name, arguments)}\n") == [ToolCall(name, arguments)], form
    text = WRITERS["tagged"](name, arguments)
    assert strip_thoughts("<think>a</think>" + text) == text


@pytest.mark.parametrize("refused", REPLIES["refused"], ids=lambda refused: refused["text"])
def test_a_call_that_is_cut_off_ambiguous_or_malformed_is_refused(refused: dict[str, str]) -> None:
    with pytest.raises(ToolCallError, match=re.escape(refused["message"])):
        parse_tool_calls(JSON_CALL + refused["text"])


def test_a_truncated_reply_has_no_open_call() -> None:
    open_calls = [JSON_CALL.removesuffix("</tool_call>"), PLAIN_CALL.removesuffix("</function>"), "<tool_call>{"]
    for text in open_calls:
        with pytest.raises(
            ToolCallError, match="was cut off at the maximum number of tokens, so no tool calls were executed"
        ):
            parse_tool_calls(JSON_CALL + text, is_truncated=True)
    for text in (JSON_CALL, PLAIN_CALL, JSON_CALL + "and so on", "<think>" + open_calls[0], ""):
        assert parse_tool_calls(text, is_truncated=True) == parse_tool_calls(text)


def test_lone_surrogates_are_replaced() -> None:
    (one,) = parse_tool_calls('<tool_call>{"name": "search", "arguments": {"q": ["\\ud83d"]}}</tool_call>')
    assert one.arguments == {"q": ["?"]}
    assert parse_tool_calls('<tool_call>{"name": "\\ud83d"}</tool_call><function=\ud83d>') == [ToolCall("?")] * 2


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
        *("<function=f><parameter=p>x</parameter> ", "[TOOL_CALLS]", "<|python_tag|>", "<|channel|>", "[f("),
        *("<|channel|>commentary to=functions.f", " to=functions.f", '<|python_tag|>{"name": "f"}'),
        *("<|python_start|>[f(", "<|python_start|>[f()]"),
        *(
            "<｜tool▁call▁begin｜>",
            "<|tool_call_begin|>",
            "<|tool_call_begin|>f:0",
            '<tool_call>{"name": "f"}</tool_call>',
        ),
        *("<function=f></function>", "<tool_call><function=f></function><function=f></function>"),
    ],
)
def test_parsing_is_linear(unit: str) -> None:
    with linear_time(), suppress(ToolCallError):
        parse_tool_calls(long_text(unit))


WRAPPED = {  # the tags that models write around all calls
    "deepseek": "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
}


@pytest.mark.parametrize("form", sorted(WRITERS))
def test_the_text_around_calls_is_found_while_it_is_streamed(form: str) -> None:
    calls = "\n".join(WRITERS[form]("search", {"query": city}) for city in ("Rome", "Oslo"))
    text = "Is 1 < 2? [yes]\n" + WRAPPED.get(form, "{}").format(calls) + "\n"
    content, found = split_calls(text)
    assert (content, [call.arguments["query"] for call in found]) == ("Is 1 < 2? [yes]", ["Rome", "Oslo"])
    assert {find_call_start(text[:n]) for n in range(len(content) + 1, len(text))} == {len(content) + 1}


def test_text_without_a_call_is_unchanged() -> None:
    for text in (" a\n", "<think>\n<tool_call>{}", "1 < 2 [3]", '{"name": "search"}'):
        assert split_calls(text) == (text, [])
    assert split_calls('{"name": "search", "parameters": {"query": "Mount Fuji"}}', is_bare=True) == ("", [SEARCH])
    assert split_calls("It is {}.", is_bare=True) == ("It is {}.", [])
    assert split_calls(f"<think>{JSON_CALL}</think>A{JSON_CALL}B") == (f"<think>{JSON_CALL}</think>AB", [SEARCH])


PYTHON_CALLS = [
    ('search(query="Mount Fuji")', [SEARCH]),
    ("fs.read(path='a]\"(', n=-1, deep={'a': [1, true, None]}), f()", None),
    ("f(1)", "literal keyword arguments"),
    ('f(a=__import__("os"))', "literal keyword arguments"),
    ('f(**{"a": 1})', "literal keyword arguments"),
    ("f(a=1, a=2)", "literal keyword arguments"),
    ("f(a=1e999)", "literal keyword arguments"),
    ("f(a={1}), g()()", "literal keyword arguments"),
    ('f(a="', "not closed"),
    ("f(a=" + "[" * 100, "nested too deeply"),
]


@pytest.mark.parametrize(("calls", "expected"), PYTHON_CALLS)
def test_calls_in_pythons_notation(calls: str, expected: Any) -> None:
    """Llama 4 writes such lists, with tags or without. They are never executed."""
    text = f"[{calls}]" if expected != "not closed" else f"[{calls}"
    assert split_calls(text) == (text, [])
    for written, is_bare in ((text, True), (f"<|python_start|>{text}<|python_end|>", False)):
        if isinstance(expected, str):
            with pytest.raises(ToolCallError, match=expected):
                split_calls(written, is_bare=is_bare)
        else:
            content, found = split_calls(written, is_bare=is_bare)
            deep = {"path": 'a]"(', "n": -1, "deep": {"a": [1, True, None]}}
            assert (content, found) == ("", expected or [ToolCall("fs.read", deep), ToolCall("f", {})])
    assert split_calls("[see (a)] and [b](c)", is_bare=True) == ("[see (a)] and [b](c)", [])


def test_ids_of_calls() -> None:
    kimi = "<|tool_call_begin|>functions.search:3<|tool_call_argument_begin|>{}"
    mistral = '[TOOL_CALLS][{"name": "search", "arguments": {}, "id": "call00001"}]'
    texts = (kimi, mistral, "[TOOL_CALLS]search[CALL_ID]call00001[ARGS]{}", JSON_CALL)
    assert [parse_tool_calls(text)[0].id for text in texts] == ["functions.search:3", "call00001", "call00001", None]


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
