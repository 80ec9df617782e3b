"""Engines behind HTTP servers, under the name that SkyRL scripts import.

For `generator.remote_inference_engine_urls`, a run creates `VLLMServerEngine` or `SGLangEngine`.
"""

from skyrl_train.inference_engines.http import HTTPEngine

RemoteInferenceEngine = HTTPEngine

__all__ = ["RemoteInferenceEngine"]
