"""The engine in another process under the name that SkyRL's scripts import."""

from skyrl_train.inference_engines.remote import RemoteEngine

RemoteInferenceEngine = RemoteEngine

__all__ = ["RemoteInferenceEngine"]
