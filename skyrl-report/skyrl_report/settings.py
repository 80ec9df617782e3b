"""Settings as dotted keys."""

from collections.abc import Iterator, Mapping


def leaves(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value) for all values in nested mappings. An empty mapping counts as a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}")
    else:
        yield key, value
