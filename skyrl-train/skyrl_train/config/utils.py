"""Names that SkyRL's scripts import from this module."""

from skyrl_train.config.cli import get_default_config as get_default_config
