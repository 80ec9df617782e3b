from typing import Any, Literal

import pytest

from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.schema import Signature


def book(
    city: str,
    nights: int = 1,
    kind: Literal["single", "double"] = "single",
    extras: list[str] | None = None,
    note: str | None = None,
    floor: Literal[1, 2] | None = None,
) -> str:
    """Book a room.

    It can be cancelled.

    Args:
        city (str): where,
            exactly
        nights: how long
    """
    return f"{city} {nights} {kind} {extras} {note} {floor}"


SIGNATURE = Signature("book", book)


def test_schema_has_the_format_of_chat_templates() -> None:
    schema = SIGNATURE.schema
    function = schema["function"]
    assert (schema["type"], function["name"]) == ("function", "book")
    assert function["description"] == "Book a room.\n\nIt can be cancelled."
    assert function["parameters"]["required"] == ["city"]
    properties = function["parameters"]["properties"]
    assert properties["city"] == {"description": "where, exactly", "type": "string"}
    assert properties["nights"] == {"default": 1, "description": "how long", "type": "integer"}
    assert properties["kind"]["enum"] == ["single", "double"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Rome"}, {"city": "Rome"}),
        ({"city": "Rome", "nights": "3"}, {"city": "Rome", "nights": 3}),
        ({"city": "Rome", "extras": '["view"]'}, {"city": "Rome", "extras": ["view"]}),
        ({"city": "[1]"}, {"city": "[1]"}),
        ({"city": "Rome", "note": '{"a": 1}'}, {"city": "Rome", "note": '{"a": 1}'}),
        ({"city": "Rome", "floor": "2", "extras": "None"}, {"city": "Rome", "floor": 2, "extras": None}),
    ],
)
def test_arguments_are_converted(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    assert SIGNATURE.check(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "The arguments of book are wrong: city: Field required"),
        ({"city": "Rome", "nights": "many"}, "nights: Input should be a valid integer"),
        ({"city": "Rome", "kind": "suite"}, "kind: Input should be 'single' or 'double'"),
        ({"city": "Rome", "view": 3}, "view: Extra inputs are not permitted"),
        ({"city": "Rome", "extras": "["}, "extras: Input should be a valid list"),
        ({"city": None}, "city: Input should be a valid string"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolCallError, match=message):
        SIGNATURE.check(arguments)


@pytest.mark.parametrize("name", ["schema", "copy", "model_config", "model_fields_set", "_x", "field_0"])
def test_parameter_may_have_any_name(name: str) -> None:
    signature = Signature("f", eval(f"lambda first, {name}=1: 0"))
    assert set(signature.schema["function"]["parameters"]["properties"]) == {"first", name}
    assert signature.check({"first": "a", name: 2}) == {"first": "a", name: 2}


def test_function_without_annotations() -> None:
    signature = Signature("f", lambda x: x)
    assert signature.schema["function"]["parameters"]["required"] == ["x"]
    assert signature.check({"x": "[1]"}) == {"x": "[1]"}
