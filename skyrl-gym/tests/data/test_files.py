from gym_kit.messages import user

from skyrl_gym.data.files import drop_nulls

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_nulls_that_a_table_adds_are_dropped() -> None:
    call = {"id": None, **CALL, "function": {"name": "add", "arguments": {"a": 1, "city": None, "list": [1, None]}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "name": None}
    assert drop_nulls([message, {"role": "user", "content": "a", "tool_calls": None}]) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1, "list": [1, None]}}}],
        },
        *user("a"),
    ]
