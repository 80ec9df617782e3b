from __future__ import annotations

import socket
import threading

import pytest

from skyrl_gym.adapters.openenv_client import ServerUnavailable, SessionOptions
from skyrl_gym.adapters.openenv_schema import Field, action_fields, action_schema, is_of_tools


def test_fields_are_those_that_a_model_fills_in() -> None:
    schema = {
        "properties": {
            "metadata": {"type": "object"},
            "type": {"const": "move", "type": "string"},
            "column": {"type": "integer", "description": "where"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "side": {"$ref": "#/$defs/Side"},
        },
        "required": ["column", "side"],
        "$defs": {"Side": {"enum": ["left", "right"], "type": "string"}},
    }
    assert action_fields(schema) == [
        Field("column", "integer", True, "where", ()),
        Field("note", "string or null", False, "", ()),
        Field("side", "string", True, "", ("left", "right")),
    ]


@pytest.mark.parametrize(
    "described", [True, False, None, {}, {"$ref": "#/$defs/gone"}, {"$ref": "#/required/0/1"}, {"anyOf": [True]}]
)
def test_a_field_of_which_nothing_is_known_may_have_any_value(described: object) -> None:
    schema = {"properties": {"x": described}, "required": ["x"]}
    assert [(field.name, field.type) for field in action_fields(schema)] == [("x", "any value")]


def test_calls_of_tools_are_known_by_their_fields() -> None:
    call = {"properties": {"tool_name": {}, "arguments": {}}}
    assert is_of_tools(call)
    assert is_of_tools({"anyOf": [True, {"$ref": "#/$defs/Call"}], "$defs": {"Call": call}})
    assert not is_of_tools({"properties": {"message": {}}})


async def test_a_server_that_speaks_no_http_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerUnavailable, match=r"does not say what actions look like.*BadStatusLine"):
            await action_schema(f"http://127.0.0.1:{server.getsockname()[1]}", SessionOptions())
        thread.join()
