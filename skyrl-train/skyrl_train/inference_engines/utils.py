"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.engine_client import get_sampling_params_for_backend as get_sampling_params_for_backend
