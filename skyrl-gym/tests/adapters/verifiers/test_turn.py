from gym_kit.texts import TAGGED_TEXTS
from hypothesis import given

from skyrl_gym.adapters.verifiers.turn import ChatTurn, chat_messages, next_turn, parse_reply
from skyrl_gym.tools.calls import ToolCall


@given(TAGGED_TEXTS)
def test_calls_are_parsed_only_if_there_are_tools(text: str) -> None:
    reply = parse_reply(text, [])
    assert (reply.calls, reply.problem) == ((), None)
    reply.text.encode()


def test_text_arguments_are_converted_to_the_types_of_the_tool() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    text = "<function=f><parameter=x>5</parameter></function><function=g><parameter=x>5</parameter></function>"
    reply = parse_reply(text, [{"type": "function", "function": function}])
    assert reply.calls == [ToolCall("f", {"x": 5}), ToolCall("g", {"x": "5"})]


def test_messages_are_merged_and_thoughts_and_calls_kept() -> None:
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "user", "content": "On."},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
        {"role": "tool", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {"role": "tool", "content": "3"},
        {"role": "user", "content": "Well?"},
    ]
    results = "<tool_response>\n1\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert chat_messages(messages) == [
        *messages[:2],
        {"role": "assistant", "content": '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'},
        {"role": "user", "content": f"{results}\nWell?"},
    ]
    call = "<tool_call>{}</tool_call>"
    message = {"role": "assistant", "content": call, "reasoning_content": "hm", "tool_calls": [{"name": "f"}]}
    assert chat_messages([message]) == [{"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{call}"}]


def test_next_turn_of_a_continued_or_rewritten_conversation() -> None:
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    went_on = next_turn(before, [*before, {"role": "user", "content": "c"}], [])
    assert went_on.observations() == [{"role": "user", "content": "c"}]
    rewritten = next_turn(before, [{"role": "user", "content": "c"}], [])
    assert rewritten == ChatTurn([{"role": "user", "content": "c"}], 0, [])
