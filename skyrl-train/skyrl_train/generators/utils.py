"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.generator_utils import *  # noqa: F403
