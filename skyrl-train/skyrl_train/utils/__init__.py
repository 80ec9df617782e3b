"""The names under which SkyRL's scripts import what has its home in other rooms."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skyrl_train.absent import refuse_name

if TYPE_CHECKING:
    from skyrl_train.entrypoints.command import validate_cfg
    from skyrl_train.launch.ray.cluster import initialize_ray
    from skyrl_train.timer import Timer

__all__ = ["Timer", "initialize_ray", "validate_cfg"]

HOMES = {
    "Timer": "skyrl_train.timer",
    "initialize_ray": "skyrl_train.launch.ray.cluster",
    "validate_cfg": "skyrl_train.entrypoints.command",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: ray is optional."""
    if name not in HOMES:
        refuse_name(__name__, name)
    return getattr(import_module(HOMES[name]), name)
