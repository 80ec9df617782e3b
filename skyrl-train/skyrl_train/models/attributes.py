"""Temporary attribute values."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def with_attribute(owners: Collection[Any], name: str, value: Any) -> Iterator[None]:
    """Set an attribute of all owners, and restore it when the context exits."""
    previous = [getattr(owner, name) for owner in owners]
    for owner in owners:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, old in zip(owners, previous, strict=True):
            setattr(owner, name, old)
