"""Names that SkyRL's scripts import from this module."""

from skyrl_train.launch.ray.engine import RayWrappedInferenceEngine as RayWrappedInferenceEngine
