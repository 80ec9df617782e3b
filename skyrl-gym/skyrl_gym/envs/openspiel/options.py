"""Options: configuration and dataset rows, plain and checked, as the fields of a dataclass."""

from __future__ import annotations

import difflib
import json
import math
import operator
from collections.abc import Collection, Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Mappings as dicts, sequences and arrays as lists, numbers of numpy as Python's; anything else as it is."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in value}
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return value
    return [plain(item) for item in value]


def given(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that are set: parquet and YAML store one that is not as None."""
    return {name: value for name, value in plain(options or {}).items() if value is not None}


def row_facts(extras: Mapping[str, Any]) -> dict[str, Any]:
    """`extra_info` of a dataset row, which may be stored as JSON. Raises `ValueError` when it holds no mapping."""
    facts = extras.get("extra_info")
    if isinstance(facts, str):
        try:
            facts = json.loads(facts)
        except json.JSONDecodeError as problem:
            raise ValueError(f"extra_info is text, but no JSON: {problem}; got {facts!r}") from problem
    if facts is not None and not isinstance(facts, Mapping):
        raise ValueError(f"extra_info must be a mapping, got {type(facts).__name__}: {facts!r}")
    return given(facts)


def row_options(extras: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The options called `names` that a row brings along, in columns of its own or in `extra_info`.

    ``max_turns`` beside them is the trainer's.
    """
    columns = given({name: extras[name] for name in names if name in extras and name != "max_turns"})
    return columns | {name: value for name, value in row_facts(extras).items() if name in names}


def reject_unknown(options: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise `ValueError` for the first option that is not `known`, naming the nearest one that is."""
    for name in options:
        if name in known:
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are: {', '.join(sorted(known))}"
        raise ValueError(f"{where} has no option {name!r} (={options[name]!r}); {hint}")


def whole_number(value: Any, name: str, at_least: int | None = None) -> int:
    """`value` as an int. Raises `ValueError` when it is none, or too small."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be a whole number, got {type(value).__name__}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def finite_number(value: Any, name: str, at_least: float | None = None) -> float:
    """`value` as a float. Raises `ValueError` when it is no finite number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}")
    return float(value)


def one_of(value: Any, name: str, choices: Collection[str]) -> str:
    """`value`, which must be one of `choices`; raises `ValueError` when it is not."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
    return str(value)
