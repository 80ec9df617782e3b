from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from skyrl_gym.adapters.settings import read_settings, reset_arguments


@dataclass(frozen=True)
class Settings:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = 3.0


def read(env_config: Mapping[str, Any], extras: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(Settings, "mine", env_config, extras or {})


def test_row_overrides_the_section_and_mappings_are_kept() -> None:
    node = MappingProxyType({"a": 1})
    options = read({"name": "x", "options": {"space": node, "pair": (1, 2)}}).options
    assert options == {"space": node, "pair": (1, 2)}
    assert options["space"] is node
    extras = {"extra_info": {"env_config": {"name": "row", "limit": None}, "index": 3}}
    assert read({"name": "config", "options": None}) == Settings("config", {}, 3.0)
    assert read({"name": "config", "limit": 5.0}, extras) == Settings("row", {}, 5.0)
    extras = {"extra_info": {"env_config": {"options": {"mine": 1, "of another row": None}}}}
    assert read({"name": "config"}, extras) == Settings("config", {"mine": 1})


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
