"""The name under which SkyRL's scripts import engines in Ray actors."""

from skyrl_train.inference_engines.remote import RemoteEngine

RayWrappedInferenceEngine = RemoteEngine
