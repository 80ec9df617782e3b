"""The module from which SkyRL scripts import the default configuration."""

from __future__ import annotations

from skyrl_train.config.cli import get_default_config

__all__ = ["get_default_config"]
