"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.tracking import Tracking as Tracking
