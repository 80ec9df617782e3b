"""The names under which SkyRL's scripts import what has its home in other rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_train.entrypoints.command import validate_cfg
    from skyrl_train.launch.ray.cluster import initialize_ray

__all__ = ["initialize_ray", "validate_cfg"]


def __getattr__(name: str) -> Any:
    """Import a name at its first use: ray is optional."""
    if name == "initialize_ray":
        from skyrl_train.launch.ray.cluster import initialize_ray

        return initialize_ray
    if name == "validate_cfg":
        from skyrl_train.entrypoints.command import validate_cfg

        return validate_cfg
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
