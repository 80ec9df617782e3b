"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.model_wrapper import HFModelWrapper as HFModelWrapper
