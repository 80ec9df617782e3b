"""JSON encoding of database values: text, numbers and null are unchanged, blobs become objects."""

import base64
from typing import Any


def as_json(value: Any) -> Any:
    """Encode a value."""
    return {"blob": base64.b64encode(value).decode("ascii")} if isinstance(value, bytes) else value


def from_json(value: Any) -> Any:
    """Decode a value."""
    return base64.b64decode(value["blob"]) if isinstance(value, dict) else value
