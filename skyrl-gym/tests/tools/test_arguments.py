from typing import Any

import pytest

from skyrl_gym.tools.arguments import convert_arguments

DEFINITIONS = {"Whole": {"type": "integer"}, "Unit/of": {"enum": ["m", "km"]}, "Cycle": {"$ref": "#/$defs/Cycle"}}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "5.0", 5.0),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "integer"}, "true", "true"),
        ({"type": "number"}, " -1e3\n", -1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "boolean"}, "FALSE", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "False", False),
        ({"type": "array", "items": {"type": "string"}}, '["é", "\\ud83d"]', ["é", "?"]),
        ({"type": "array"}, "[" * 1000, "[" * 1000),
        ({"type": "object"}, '{"a": {"b": [null, 1]}}', {"a": {"b": [None, 1]}}),
        *(({"anyOf": [{"type": "string"}, {"type": "null"}]}, text, text) for text in ('{"a": 1}', "5", "null")),
        ({"type": "string", "pattern": "^a"}, "5", "5"),
        ({"oneOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "auto", "auto"),
        ({"oneOf": [{"enum": ["auto"]}, {"type": "integer"}]}, "5", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [1, 2]}, "true", "true"),
        ({"const": None}, "null", None),
        ({"$ref": "#/$defs/Whole"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Whole"}]}, "5", 5),
        ({"$ref": "#/$defs/Unit~1of"}, "km", "km"),
        ({"$ref": "#/$defs/Cycle"}, "5", "5"),
        ({"$ref": "#/$defs/Missing"}, "5", "5"),
        ({}, "[1]", "[1]"),
        (True, "5", "5"),
    ],
)
def test_text_is_converted_only_where_the_schema_takes_no_text(schema: Any, text: str, expected: Any) -> None:
    parameters = {"$defs": DEFINITIONS, "properties": {"x": schema}}
    converted = convert_arguments({"x": text, "other": "5"}, parameters)["x"]
    assert (converted, type(converted)) == (expected, type(expected))
