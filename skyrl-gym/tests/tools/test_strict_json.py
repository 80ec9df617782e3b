import json

import pytest

from skyrl_gym.tools.strict_json import MAX_DEPTH, BadJSON, TooDeep, parse_json, parse_json_at


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "error at line 1, column 1: Expecting value"),
        ("[1,\n x]", "error at line 2, column 2: Expecting value"),
        ("{} {}", "error at line 1, column 4: Extra data"),
        ("NaN", "it contains an invalid number"),
        ("[-Infinity]", "it contains an invalid number"),
        ("1e999", "it contains an invalid number"),
        ('{"b": 1, "a": 1, "a": 2}', 'it has the key "a" twice'),
        ("9" * 5000, "it contains an invalid number"),
        (nested(MAX_DEPTH + 1), "it is nested too deeply"),
        (nested(100_000), "it is nested too deeply"),
        ('{"a":' * 500 + "1" + "}" * 500, "it is nested too deeply"),
    ],
)
def test_invalid_json_is_explained(text: str, message: str) -> None:
    with pytest.raises(BadJSON) as error:
        parse_json(text)
    assert str(error.value) == message


def test_value_inside_a_text() -> None:
    text = "see " + nested(MAX_DEPTH) + " there"
    value, end = parse_json_at(text, 4)
    assert (json.dumps(value), text[end:]) == (nested(MAX_DEPTH), " there")
    with pytest.raises(TooDeep):
        parse_json_at(nested(MAX_DEPTH + 1), 0)
    with pytest.raises(BadJSON, match="column 1: Expecting value"):
        parse_json_at("see", 0)
