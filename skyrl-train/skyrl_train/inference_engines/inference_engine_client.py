"""Names that SkyRL's scripts import from this module."""

from skyrl_train.compat.skyrl.engine_client import InferenceEngineClient as InferenceEngineClient
