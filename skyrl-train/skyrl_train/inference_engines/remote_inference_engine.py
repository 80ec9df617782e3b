"""The name under which SkyRL's scripts import engines behind HTTP servers."""

from skyrl_train.inference_engines.http import HTTPEngine

RemoteInferenceEngine = HTTPEngine
