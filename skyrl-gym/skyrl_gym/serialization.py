"""What crosses over to an environment's process, and back, as JSON."""

from __future__ import annotations

from typing import Any


def plain(value: Any) -> Any:
    """What `json.dumps` takes for arrays and numbers of numpy and torch, and for dates and times: its `default`."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"{value!r} has no JSON, and an environment in a process of its own is told and answers in JSON")
