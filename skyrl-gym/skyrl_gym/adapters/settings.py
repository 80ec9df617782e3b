"""Settings of adapters: the configuration section, a row's overrides, and the arguments of `reset`."""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from skyrl_gym.envs.row import parse_settings, read_extra_info, read_struct, to_python, whole_number
from skyrl_gym.error import InvalidSettings

S = TypeVar("S")

NO_LIMIT = sys.maxsize
"""Default `max_turns` outside training. In training, it is always set."""


def read_settings(kind: type[S], env_class: str, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> S:
    """Parse the section of `env_class`, overridden by a row's `extra_info.env_config`, into the dataclass `kind`.

    Raises:
        InvalidSettings: a key is unknown, a key without a default is missing, or a section has the wrong type.
    """
    overrides = read_struct(read_extra_info(extras).get("env_config"), "extra_info.env_config")
    values = to_python(env_config or {}) | overrides
    values.pop("env_class", None)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if values.keys() <= fields.keys():
        for field in fields.values():
            key = f"environment.skyrl_gym.{env_class}.{field.name}"
            value = values.get(field.name)
            if field.default_factory is dict:
                if value is None:
                    values.pop(field.name, None)
                elif not isinstance(value, dict):
                    raise InvalidSettings(f"{key}={value!r} must be a section: set {key}.<key>")
            elif value is None and field.default is dataclasses.MISSING:
                raise InvalidSettings(f"{key} is missing; set it in the configuration")
    return parse_settings(env_class, values, kind)


def reset_arguments(defaults: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `reset`: `defaults`, overridden by `seed` and `reset` in the row or its `extra_info`."""
    arguments = dict(defaults)
    for name, source in (("extra_info.", read_extra_info(extras)), ("", extras)):
        if (seed := source.get("seed")) is not None:
            arguments["seed"] = whole_number(seed, f"{name}seed")  # some libraries reject numpy integers as seeds
        arguments |= read_struct(source.get("reset"), f"{name}reset")
    return arguments
