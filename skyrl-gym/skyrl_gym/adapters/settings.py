"""How an adapter is set up: a section of the configuration, a row's changes to it, and what a row asks of `reset`."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from skyrl_gym.envs.row import max_turns_of, settings_of

S = TypeVar("S")

NO_LIMIT = sys.maxsize
"""The turns of an episode by hand that sets no `max_turns`."""


def read_settings(kind: type[S], env_class: str, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> S:
    """The section of `env_class`, with a row's `extra_info.env_config` over it, as the dataclass `kind`.

    Raises:
        ValueError: a key is unknown, or one without a default is missing, or a section is something else.
    """
    given = plain(dict(env_config or {})) | of_row(extra_info(extras).get("env_config"), "extra_info.env_config")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if given.keys() <= fields.keys():
        for field in fields.values():
            _check(f"environment.skyrl_gym.{env_class}.{field.name}", field, given)
    return settings_of(env_class, given, kind)


def _check(key: str, field: dataclasses.Field[Any], given: dict[str, Any]) -> None:
    """Raises ValueError for a value that is missing, or is no section where one belongs. An empty section is none."""
    value = given.get(field.name)
    if field.default_factory is dict:
        if value is None:
            given.pop(field.name, None)
        elif not isinstance(value, dict):
            raise ValueError(f"{key}={value!r} must be a section: set {key}.<key>")
    elif value is None and field.default is dataclasses.MISSING:
        raise ValueError(f"{key} is missing; set it in the configuration")


def extra_info(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra_info` of a row, which may be missing."""
    return of_row(extras.get("extra_info"), "extra_info")


def reset_arguments(defaults: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """What `reset` is called with: `defaults`, and over them `seed` and `reset` of a row or of its `extra_info`."""
    arguments = dict(defaults)
    for name, source in (("extra_info.", extra_info(extras)), ("", extras)):
        if (seed := source.get("seed")) is not None:
            arguments["seed"] = _whole(seed, f"{name}seed")
        arguments |= of_row(source.get("reset"), f"{name}reset")
    return arguments


def max_turns(extras: Mapping[str, Any]) -> int:
    """The turns that an episode may have, see `max_turns_of`; `NO_LIMIT` where nobody says."""
    return max_turns_of(extras, NO_LIMIT)


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)  # numpy's integers are no seeds for everybody
    except TypeError:
        raise ValueError(f"{name}={value!r} of a dataset row must be a whole number") from None


def of_row(value: Any, name: str) -> dict[str, Any]:
    """A struct of a dataset row as a dict. Parquet stores a missing key as None, so None means missing, inside it too.

    Raises:
        ValueError: it is something else; the message has its `name`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} of a dataset row must be a dict")
    return _without_none(plain(dict(value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def plain(value: Any) -> Any:
    """Dicts and lists in place of the nodes of OmegaConf. What else behaves like them stays what it is."""
    is_node = type(value).__module__.partition(".")[0] == "omegaconf"
    if isinstance(value, dict) or (is_node and isinstance(value, Mapping)):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list) or (is_node and isinstance(value, Sequence)):
        return [plain(item) for item in value]
    return value
