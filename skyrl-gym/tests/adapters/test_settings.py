from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from skyrl_gym.adapters.settings import read_settings, reset_arguments


@dataclass(frozen=True)
class Settings:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = 3.0


def read(env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(Settings, "mine", env_config, extras or {})


def test_omegaconf_section_is_converted() -> None:
    config = OmegaConf.create({"name": "${other}", "options": {"a": [1, {"b": 2}]}, "limit": None})
    settings = read(OmegaConf.create({"other": "x", "section": config}).section)
    assert settings == Settings("x", {"a": [1, {"b": 2}]}, None)
    assert type(settings.options) is dict
    assert type(settings.options["a"]) is list


def test_other_mappings_are_kept() -> None:
    node = MappingProxyType({"a": 1})
    options = read({"name": "x", "options": {"space": node, "pair": (1, 2)}}).options
    assert options == {"space": node, "pair": (1, 2)}
    assert options["space"] is node


def test_row_overrides_the_section() -> None:
    extras = {"extra_info": {"env_config": {"name": "row", "limit": None}, "index": 3}}
    assert read({"name": "config", "options": None}) == Settings("config", {}, 3.0)
    assert read({"name": "config", "limit": 5.0}, extras) == Settings("row", {}, 5.0)
    extras = {"extra_info": {"env_config": {"options": {"mine": 1, "of another row": None}}}}
    assert read({"name": "config"}, extras) == Settings("config", {"mine": 1})


@pytest.mark.parametrize(
    ("env_config", "message"),
    [
        ({}, r"environment\.skyrl_gym\.mine\.name is missing"),
        ({"name": None}, r"mine\.name is missing"),
        ({"name": "x", "limits": 1}, r"mine\.limits is unknown; did you mean limit\?"),
        ({"name": "x", "q": 1}, r"mine\.q is unknown; the keys are: name, options, limit"),
        ({"name": "x", "options": "fast"}, r"mine\.options='fast' must be a section: set .*mine\.options\.<key>"),
    ],
)
def test_invalid_config_raises(env_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(env_config)
    with pytest.raises(ValueError, match=r"mine\.name is missing"):
        read_settings(Settings, "mine", None, {})


def test_reset_arguments() -> None:
    extras = {
        "seed": 3,
        "reset": {"level": 2, "unset": None, "options": {"low": 3, "unset": None}},
        "extra_info": {"seed": 1, "reset": {"level": 1, "map": "m"}},
    }
    expected = {"level": 2, "game": "g", "seed": 3, "map": "m", "options": {"low": 3}}
    assert reset_arguments({"level": 0, "game": "g"}, extras) == expected
    assert reset_arguments({"seed": 9}, {"seed": None, "extra_info": None}) == {"seed": 9}
    assert type(reset_arguments({}, {"seed": np.int64(5)})["seed"]) is int
    with pytest.raises(ValueError, match=r"extra_info\.seed='x' must be a whole number"):
        reset_arguments({}, {"extra_info": {"seed": "x"}})
    with pytest.raises(ValueError, match=r"extra_info\.reset=3 of a dataset row"):
        reset_arguments({}, {"extra_info": {"reset": 3}})
