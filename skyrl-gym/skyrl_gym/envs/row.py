"""What environments read of a dataset row, and of their section of the configuration."""

from __future__ import annotations

import dataclasses
import difflib
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

S = TypeVar("S")


def ground_truth_of(extras: Mapping[str, Any], fields: tuple[str, ...] = ("reward_spec",)) -> Any:
    """The right answer of a row, from the first of `fields` that the row has.

    Raises:
        AssertionError: the field, or its `ground_truth`, is missing. (SkyRL's choice, which its users' tests expect.)
    """
    field = next((field for field in fields if extras.get(field) is not None), None)
    if field is None:
        needed = ", or ".join(f"{field} field is required" for field in fields)
        raise AssertionError(f"{needed}: give the row {fields[0]}={{'ground_truth': …}}; it has {sorted(extras)}")
    spec = extras[field]
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    if truth is None or (isinstance(truth, str) and not truth.strip()):
        raise AssertionError(f"ground_truth is required in {field} field; got {field}={spec!r}")
    return truth


def answer_of(extras: Mapping[str, Any], fields: tuple[str, ...] = ("reward_spec",)) -> str:
    """The right answer of a row that is compared as text: text, or a whole number.

    Raises:
        AssertionError: see `ground_truth_of`.
        ValueError: the ground truth is of another kind.
    """
    truth = ground_truth_of(extras, fields)
    return truth.strip() if isinstance(truth, str) else str(_whole(truth, "ground_truth", "text or a whole number"))


def max_turns_of(extras: Mapping[str, Any], default: int) -> int:
    """How many turns the episode may take: `max_turns`, else ``extra_info["max_turns"]``, else `default`.

    Raises:
        ValueError: it is no whole number, or less than 1.
    """
    given = [source.get("max_turns") for source in (extras, extras.get("extra_info") or {})]
    # Parquet stores a missing key as None.
    max_turns = next((_whole(value, "max_turns", "a whole number") for value in given if value is not None), default)
    if max_turns < 1:
        raise ValueError(f"max_turns={max_turns}: an episode has at least 1 turn; set generator.max_turns")
    return max_turns


def settings_of(env_class: str, env_config: Mapping[str, Any] | None, kind: type[S]) -> S:
    """The section `environment.skyrl_gym.<env_class>` as the dataclass `kind`; what it does not set has its default.

    Raises:
        ValueError: it sets something else, or a value of another type.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    given = dict(env_config or {})
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise ValueError(f"environment.skyrl_gym.{env_class}.{name} is unknown; {hint}")
    try:
        for name, value in given.items():
            _types(kind)[name].validate_python(value, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        (problem, *_) = error.errors()
        key = ".".join(["environment", "skyrl_gym", env_class, name, *map(str, problem["loc"])])
        raise ValueError(f"{key}={problem['input']!r} {problem['msg'].removeprefix('Input ')}") from None
    return kind(**given)


@cache
def _types(kind: type) -> dict[str, TypeAdapter[Any]]:
    """What checks a value of each field."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items()}


def _whole(value: Any, name: str, kind: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be {kind}, got {type(value).__name__}") from None
