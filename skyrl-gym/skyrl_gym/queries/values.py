"""Values of a database as JSON: text, numbers and null stand for themselves, a blob is an object."""

from __future__ import annotations

import base64
from typing import Any


def as_json(value: Any) -> Any:
    """What stands for a value."""
    return {"blob": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value


def from_json(value: Any) -> Any:
    """The value again."""
    return base64.b64decode(value["blob"]) if isinstance(value, dict) else value
