import json
from collections.abc import Mapping
from typing import Any


def user(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def message_text(output: Mapping[str, Any]) -> str:
    """Return the text of a step's only observation."""
    (message,) = output["observations"]
    assert message["role"] == "user"
    text: str = message["content"]
    return text
