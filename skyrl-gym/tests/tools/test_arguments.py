from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_gym.tools.arguments import convert_arguments

DEFINITIONS = {"Whole": {"type": "integer"}, "Unit/of": {"enum": ["m", "km"]}, "Cycle": {"$ref": "#/$defs/Cycle"}}
CASES = yaml.safe_load(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("schema", "text", "expected"), [*CASES, ({"type": "array"}, "[" * 1000, "[" * 1000)])
def test_text_is_converted_only_where_the_schema_takes_no_text(schema: Any, text: str, expected: Any) -> None:
    parameters = {"$defs": DEFINITIONS, "properties": {"x": schema}}
    converted = convert_arguments({"x": text, "other": "5"}, parameters)["x"]
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize("schema", [{"type": 5}, {"type": [{}]}, {"enum": 5}, {"anyOf": {}}, {"$ref": 5}, 5])
def test_malformed_schemas_are_no_error(schema: Any) -> None:
    assert convert_arguments({"x": "five"}, {"properties": {"x": schema}}) == {"x": "five"}
    assert convert_arguments({"x": "five"}, {"properties": schema}) == {"x": "five"}
