import socket
import threading

import pytest

from skyrl_gym.adapters.openenv.client import ServerUnavailable, SessionOptions
from skyrl_gym.adapters.openenv.schema import Field, action_fields, fetch_action_schema, has_tool_actions


def test_fields_exclude_constants_and_identify_tool_actions() -> None:
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
    call = {"properties": {"tool_name": {}, "arguments": {}}}
    assert has_tool_actions(call)
    assert has_tool_actions({"anyOf": [True, {"$ref": "#/$defs/Call"}], "$defs": {"Call": call}})
    assert not has_tool_actions({"properties": {"message": {}}})


@pytest.mark.parametrize(
    "described", [True, False, None, {}, {"$ref": "#/$defs/gone"}, {"$ref": "#/required/0/1"}, {"anyOf": [True]}]
)
def test_field_without_a_type_may_have_any_value(described: object) -> None:
    schema = {"properties": {"x": described}, "required": ["x"]}
    assert [(field.name, field.type) for field in action_fields(schema)] == [("x", "any value")]


async def test_server_without_http_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerUnavailable, match=r"returned no schema of actions.*BadStatusLine"):
            await fetch_action_schema(f"http://127.0.0.1:{server.getsockname()[1]}", SessionOptions())
        thread.join()
