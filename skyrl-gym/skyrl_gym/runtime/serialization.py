"""JSON encoding of the values that cross between the trainer and the process of an environment."""

from __future__ import annotations

from typing import Any


def to_json_value(value: Any) -> Any:
    """Convert arrays and numbers of numpy and torch, dates and times for JSON; the `default` of `json.dumps`."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r} cannot be written as JSON; an environment in a separate process needs JSON values")
