"""Validation of options from the configuration and dataset rows."""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from skyrl_gym.envs.row import read_extra_info, to_python


def set_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop options that are None, because parquet and YAML store missing options that way."""
    return {name: value for name, value in to_python(options or {}).items() if value is not None}


def row_options(extras: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the options in `names` from a row's columns and its `extra_info`. `extra_info` wins over columns.

    The column ``max_turns`` is excluded, since the trainer writes it.
    """
    columns = set_options({name: extras[name] for name in names if name in extras and name != "max_turns"})
    return columns | {name: value for name, value in read_extra_info(extras).items() if name in names}


def reject_unknown(options: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise `ValueError` for the first option that is not `known`, and suggest the closest known name."""
    for name in options:
        if name in known:
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"the options are: {', '.join(sorted(known))}"
        raise ValueError(f"{where} has no option {name!r} (={options[name]!r}); {hint}")


def finite_number(value: Any, name: str, at_least: float | None = None) -> float:
    """Convert `value` to a float. Raises `ValueError` if it is not a finite number or is too small."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}")
    return float(value)


def one_of(value: Any, name: str, choices: Collection[str]) -> str:
    """Return `value` as text. Raises `ValueError` if it is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(choices)}")
    return str(value)
