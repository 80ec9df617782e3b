import pytest

from skyrl_gym.tools.messages import append_text, append_to_system

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}


def test_a_system_message_is_extended_or_added() -> None:
    assert append_to_system([SYSTEM, USER], "Tools.") == [{"role": "system", "content": "Be brief.\n\nTools."}, USER]
    assert append_to_system([USER], "Tools.") == [{"role": "system", "content": "Tools."}, USER]
    assert append_to_system([USER], "") == [USER]
    assert append_to_system([], "Tools.") == [{"role": "system", "content": "Tools."}]
    assert SYSTEM["content"] == "Be brief."


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("Be brief.", "Be brief.\n\nX."),
        ("", "X."),
        (None, "X."),
        ([{"type": "text", "text": "A"}], [{"type": "text", "text": "A"}, {"type": "text", "text": "X."}]),
    ],
)
def test_text_is_appended_to_any_content(content: object, expected: object) -> None:
    assert append_text({"role": "user", "content": content, "name": "Ann"}, "X.") == {
        "role": "user",
        "content": expected,
        "name": "Ann",
    }
