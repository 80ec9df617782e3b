"""Readers for the dataset rows and configuration sections of environments."""

import dataclasses
import difflib
import json
import operator
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from skyrl_gym.error import InvalidSettings

S = TypeVar("S")

NO_ROW: Mapping[str, Any] = MappingProxyType({})
"""Default row of a constructor. It reports the first missing field that the environment needs."""

TRAINER_FIELDS = ("max_turns", "reads_images")
"""Fields of `extras` that the trainer writes."""


def to_python(value: Any) -> Any:
    """Convert OmegaConf nodes to dicts and lists, and numpy values to Python values. Leave other objects alone."""
    package = type(value).__module__.partition(".")[0]
    is_node = package == "omegaconf"
    if isinstance(value, dict) or (is_node and isinstance(value, Mapping)):
        return {str(key): to_python(item) for key, item in value.items()}
    if isinstance(value, list) or (is_node and isinstance(value, Sequence)):
        return [to_python(item) for item in value]
    if package == "numpy" and hasattr(value, "tolist"):
        return to_python(value.tolist())
    return value


def read_struct(value: Any, name: str) -> dict[str, Any]:
    """Return a struct of a dataset row as a dict without None values, since Parquet stores missing keys as None.

    Raises:
        ValueError: `value` is not a struct. The message contains `name`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} of a dataset row must be a dict")
    return _without_none(to_python(value))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def read_extra_info(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's `extra_info`, parsed if it is JSON text, or {} if it is missing.

    Raises:
        ValueError: it is neither a struct nor JSON.
    """
    value = extras.get("extra_info")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"extra_info={value!r} of a dataset row is text but not JSON: {error}") from None
    return read_struct(value, "extra_info")


def read_ground_truth(extras: Mapping[str, Any], fields: tuple[str, ...] = ("reward_spec",)) -> Any:
    """Return the ground truth of a row, from the first of `fields` that the row has.

    Raises:
        AssertionError: the field, or its `ground_truth`, is missing. (SkyRL's users expect this type.)
    """
    field = next((field for field in fields if extras.get(field) is not None), None)
    if field is None:
        needed = ", or ".join(f"{field} field is required" for field in fields)
        raise AssertionError(f"{needed}: add {fields[0]}={{'ground_truth': …}} to the row, which has {sorted(extras)}")
    spec = extras[field]
    truth = spec.get("ground_truth") if isinstance(spec, Mapping) else None
    if truth is None or (isinstance(truth, str) and not truth.strip()):
        raise AssertionError(f"ground_truth is required in {field} field; got {field}={spec!r}")
    return truth


def read_answer(extras: Mapping[str, Any], fields: tuple[str, ...] = ("reward_spec",)) -> str:
    """Return a row's ground truth as text. It may be text or a whole number.

    Raises:
        AssertionError: the field, or its `ground_truth`, is missing.
        ValueError: the ground truth has any other type.
    """
    truth = read_ground_truth(extras, fields)
    return (
        truth.strip()
        if isinstance(truth, str)
        else str(whole_number(truth, "ground_truth", kind="text or a whole number"))
    )


def read_max_turns(extras: Mapping[str, Any], default: int) -> int:
    """Return the maximum number of turns: `max_turns`, else ``extra_info["max_turns"]``, else `default`.

    Raises:
        ValueError: it is not a whole number, or less than 1.
    """
    max_turns = extras.get("max_turns")
    if max_turns is None:  # Parquet stores a missing key as None
        max_turns = read_extra_info(extras).get("max_turns", default)
    n_turns = whole_number(max_turns, "max_turns")
    if n_turns < 1:
        raise ValueError(f"max_turns={n_turns} must be at least 1; set generator.max_turns")
    return n_turns


def reads_images(extras: Mapping[str, Any]) -> bool:
    """Return True if the model reads images: the trainer writes `reads_images`."""
    return bool(extras.get("reads_images"))


def whole_number(value: Any, name: str, at_least: int | None = None, *, kind: str = "a whole number") -> int:
    """Convert a whole number, e.g. of numpy, to an int.

    Raises:
        ValueError: it is not a whole number, or too small. The message contains `name` and the allowed `kind` of value.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be {kind}, got {type(value).__name__}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name}={number} must be at least {at_least}")
    return number


def parse_settings(env_class: str, env_config: Mapping[str, Any] | None, kind: type[S]) -> S:
    """Parse the section `environment.skyrl_gym.<env_class>` into the dataclass `kind`, with the dataclass's defaults.

    The key `env_class` is ignored: SkyRL's sections may have it.

    Raises:
        InvalidSettings: the section has an unknown key, or a value of the wrong type.
    """
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    settings = {name: value for name, value in (env_config or {}).items() if name != "env_class"}
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are: {', '.join(names)}"
            raise InvalidSettings(f"environment.skyrl_gym.{env_class}.{name} is unknown; {hint}")
    try:
        for name, value in settings.items():
            _validators(kind)[name].validate_python(value, strict=True)  # type: ignore[arg-type]
    except ValidationError as error:
        (problem, *_) = error.errors()
        key = ".".join(["environment", "skyrl_gym", env_class, name, *map(str, problem["loc"])])
        raise InvalidSettings(f"{key}={problem['input']!r} {problem['msg'].removeprefix('Input ')}") from None
    return kind(**settings)


@cache
def _validators(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Return a validator for each field of a dataclass."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind).items()}
