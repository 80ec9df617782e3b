"""Settings of adapters: the configuration section, its overrides in a row, and the arguments of `reset`."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from skyrl_gym.envs.row import parse_settings

S = TypeVar("S")

NO_LIMIT = sys.maxsize
"""The `max_turns` of an episode that does not set it, which happens only outside of training."""


def read_settings(kind: type[S], env_class: str, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> S:
    """Parse the section of `env_class`, overridden by a row's `extra_info.env_config`, into the dataclass `kind`.

    Raises:
        ValueError: a key is unknown, a key without a default is missing, or a section has another type.
    """
    overrides = read_struct(read_extra_info(extras).get("env_config"), "extra_info.env_config")
    values = unwrap_omegaconf(dict(env_config or {})) | overrides
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if values.keys() <= fields.keys():
        for field in fields.values():
            _check(f"environment.skyrl_gym.{env_class}.{field.name}", field, values)
    return parse_settings(env_class, values, kind)


def _check(key: str, field: dataclasses.Field[Any], values: dict[str, Any]) -> None:
    """Raise ValueError for a missing value, or a section of another type. Drop a section that is None."""
    value = values.get(field.name)
    if field.default_factory is dict:
        if value is None:
            values.pop(field.name, None)
        elif not isinstance(value, dict):
            raise ValueError(f"{key}={value!r} must be a section: set {key}.<key>")
    elif value is None and field.default is dataclasses.MISSING:
        raise ValueError(f"{key} is missing; set it in the configuration")


def read_extra_info(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `extra_info` of a row; empty if it is missing."""
    return read_struct(extras.get("extra_info"), "extra_info")


def reset_arguments(defaults: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `reset`: `defaults`, overridden by `seed` and `reset` of a row or of its `extra_info`."""
    arguments = dict(defaults)
    for name, source in (("extra_info.", read_extra_info(extras)), ("", extras)):
        if (seed := source.get("seed")) is not None:
            arguments["seed"] = _whole(seed, f"{name}seed")
        arguments |= read_struct(source.get("reset"), f"{name}reset")
    return arguments


def _whole(value: Any, name: str) -> int:
    try:
        return operator.index(value)  # some libraries refuse numpy integers as seeds
    except TypeError:
        raise ValueError(f"{name}={value!r} of a dataset row must be a whole number") from None


def read_struct(value: Any, name: str) -> dict[str, Any]:
    """Return a struct of a dataset row as a dict without None values, which is how Parquet stores missing keys.

    Raises:
        ValueError: `value` is not a struct; the message has its `name`.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={value!r} of a dataset row must be a dict")
    return _without_none(unwrap_omegaconf(dict(value)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def unwrap_omegaconf(value: Any) -> Any:
    """Convert OmegaConf nodes to dicts and lists. Other mappings and sequences are kept."""
    is_node = type(value).__module__.partition(".")[0] == "omegaconf"
    if isinstance(value, dict) or (is_node and isinstance(value, Mapping)):
        return {str(key): unwrap_omegaconf(item) for key, item in value.items()}
    if isinstance(value, list) or (is_node and isinstance(value, Sequence)):
        return [unwrap_omegaconf(item) for item in value]
    return value
