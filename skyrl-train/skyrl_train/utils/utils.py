"""`skyrl_train.utils` under another module name that SkyRL's scripts import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_train import utils

if TYPE_CHECKING:
    from skyrl_train.utils import Timer, initialize_ray, validate_cfg

__all__ = ["Timer", "initialize_ray", "validate_cfg"]


def __getattr__(name: str) -> Any:
    return getattr(utils, name)
