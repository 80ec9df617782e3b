"""Key aliases of SkyRL and verl. The tables are in `skyrl_train.compat` and are loaded by name."""

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from skyrl_train.aliases import Alias

_SKYRL, _VERL = (import_module(f"skyrl_train.compat.{name}.keys") for name in ("skyrl", "verl"))

SKYRL: Mapping[str, Alias] = _SKYRL.ALIASES
VERL: Mapping[str, Alias] = _VERL.ALIASES
VERL_SFT: Mapping[str, Alias] = _VERL.SFT_ALIASES
ALIASES = {**SKYRL, **VERL}
"""Aliases of reinforcement learning."""

TASK_OPTIONS: Collection[str] = _VERL.TASK_OPTIONS
MEMORY_WITHOUT_EFFECT: Mapping[str, str] = _SKYRL.MEMORY_WITHOUT_EFFECT
SKYRL_WITHOUT_EFFECT: Mapping[str, str] = _SKYRL.WITHOUT_EFFECT
UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = _SKYRL.UNSUPPORTED
