"""Engines behind HTTP servers under the name that SkyRL's scripts import.

`generator.remote_inference_engine_urls` makes them: `VLLMServerEngine` or `SGLangEngine`.
"""

from skyrl_train.inference_engines.http import HTTPEngine

RemoteInferenceEngine = HTTPEngine

__all__ = ["RemoteInferenceEngine"]
