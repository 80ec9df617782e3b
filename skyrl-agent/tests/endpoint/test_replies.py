"""Replies are divided into thought, content and calls, in streams as in whole responses."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skyrl_agent.endpoint.replies import Reply, ReplyFormat, ReplyStream, TextStream
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineResult
from skyrl_train.types import StopReason

TAGS = {"<think>": "</think>"}
HARMONY = {"<|channel|>analysis<|message|>": "<|end|>"}
TOOLS: dict[str, Any] = {"add": {"properties": {"a": {"type": "integer"}}}}
FORMS = {
    "text": ReplyFormat(),
    "thoughts": ReplyFormat(TAGS),
    "opened": ReplyFormat(TAGS, open_tag="<think>", tools=TOOLS),
    "tools": ReplyFormat(TAGS, tools=TOOLS),
    "bare": ReplyFormat(tools=TOOLS, calls_are_bare=True),
    "one call": ReplyFormat(tools=TOOLS, max_calls=1),
    "channels": ReplyFormat(HARMONY, has_channels=True, tools=TOOLS),
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
KIMI = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
PIECES = ["<think>", "</think>", CALL, "<tool_call>{", "<function=add>", "{", "<", " ", "\n", "a", "é", "<|end|>"]
PIECES += [*HARMONY, "<|start|>assistant<|channel|>final<|message|>", '{"name": "add", "arguments": {}}']


def split(form: str, text: str, stop_reason: StopReason = StopReason.STOP) -> Reply:
    return FORMS[form].split(text, is_truncated=stop_reason != StopReason.STOP, seed=1)


@pytest.mark.parametrize("form", FORMS)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    cuts=st.lists(st.integers(1, 9), max_size=60),
    is_whole=st.booleans(),
)
@example(text="<think>\nA \n</think>\n\n B < c\n" + CALL + "\n" + CALL, cuts=[1] * 60, is_whole=True)
@example(text=" \n<think", cuts=[1] * 60, is_whole=True)
@example(text='{"name": "add", "arguments": {}}', cuts=[1] * 60, is_whole=True)
def test_streamed_parts_add_up(chat: ChatEncoder, form: str, text: str, cuts: list[int], is_whole: bool) -> None:
    token_ids = chat.encode(text)
    result = EngineResult(token_ids, [0.0] * len(token_ids), StopReason.STOP if is_whole else StopReason.LENGTH, ())
    stream = ReplyStream(TextStream(chat.decode, [], keeps_stop=False), FORMS[form])
    parts, position = ["", ""], 0
    for n in [*cuts, len(token_ids)]:
        parts = [part + new for part, new in zip(parts, stream.push(token_ids[position : position + n]), strict=True)]
        position += n
    *rests, reply = stream.finish(result, seed=1)
    parts = [part + rest for part, rest in zip(parts, rests, strict=True)]
    assert reply == split(form, TextStream(chat.decode, [], keeps_stop=False).finish(result), result.stop_reason)
    assert parts == [reply.thought, reply.content]


@pytest.mark.parametrize(
    ("form", "text", "thought", "content", "n_calls"),
    [
        ("text", f" <think>A</think>{CALL}", "", f" <think>A</think>{CALL}", 0),
        ("thoughts", " <think>\nA\n</think>\n\nB ", "A", "B ", 0),
        ("thoughts", "A</think>B", "", "A</think>B", 0),
        ("thoughts", "<think>A", "A", "", 0),
        ("opened", "A\n</think>B", "A", "B", 0),
        ("opened", f"<think>{CALL}</think>\n{CALL}", CALL, "", 1),
        ("tools", f"A\n{CALL}\n{CALL}\nB", "", "A\nB", 2),
        ("tools", "<function=add><parameter=a>5</parameter></function>", "", "", 1),
        ("bare", '\n{"name": "add", "parameters": {"a": 1}}', "", "", 1),
        ("bare", '{"a": 1}', "", '{"a": 1}', 0),
        ("tools", KIMI + KIMI, "", "", 2),
        ("one call", CALL + CALL, "", "", 1),
        (
            "channels",
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B",
            "A",
            "B",
            0,
        ),
        ("channels", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", 1),
    ],
)
def test_parts_of_a_reply(form: str, text: str, thought: str, content: str, n_calls: int) -> None:
    reply = split(form, text)
    assert (reply.thought, reply.content, len(reply.calls)) == (thought, content, n_calls)
    assert {call.id for call in reply.calls} == {call.id for call in split(form, text).calls}, "ids are stable"
    assert len({call.id for call in reply.calls}) == n_calls
    assert all(call.arguments["a"] in (1, 5) for call in reply.calls), "text is converted to the type of the schema"


def test_ids_that_the_model_wrote_are_kept() -> None:
    assert [call.id for call in split("tools", KIMI + KIMI.replace(":0", ":1")).calls] == [
        f"functions.add:{i}" for i in (0, 1)
    ]


@pytest.mark.parametrize("text", [f"{CALL}<tool_call>{{", '<tool_call>{"name": 3}</tool_call>'])
def test_malformed_calls_stay_text(text: str) -> None:
    assert split("tools", text) == Reply(text, is_malformed=True)


def test_a_call_that_was_cut_off_stays_text() -> None:
    text = CALL.removesuffix("</tool_call>")
    assert len(split("tools", text).calls) == 1, "its end may be the stop string"
    assert split("tools", text, StopReason.LENGTH) == Reply(text, is_malformed=True)
    assert len(split("tools", CALL, StopReason.LENGTH).calls) == 1
