"""Aliases of keys.

Only keys with the same meaning are listed. A value map translates values that are spelled differently and leaves all
others unchanged. If it maps a value to None, the key is not set.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Alias:
    """The key that an alias sets, and its value map."""

    key: str
    values: Mapping[Any, Any] = field(default_factory=dict)

    also: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Other keys that the alias sets, each with a function of its value."""

    only_if: str | None = None
    """A key that must be true; otherwise the alias has no effect, as in its own framework."""

    @property
    def is_synonym(self) -> bool:
        """True if it always sets its key, and nothing else."""
        return not self.also and self.only_if is None and None not in self.values.values()

    def readings(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the keys to set, with their values."""
        main = self.translate(value)
        if main is not None or value is None:
            yield self.key, main
        yield from ((key, function(value)) for key, function in self.also.items())

    def translate(self, value: Any) -> Any:
        """Return the value in this configuration; None if the key is not set."""
        try:
            return self.values.get(value, value)
        except TypeError:  # lists and mappings are not hashable
            return value
