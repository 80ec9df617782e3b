"""JSON encoding of values that cross between the trainer and an environment's process."""

from typing import Any


def to_json_value(value: Any) -> Any:
    """Convert numpy and torch values, dates and times for JSON. Use as `default` of `json.dumps`."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r} cannot be written as JSON; an environment in a separate process needs JSON values")
