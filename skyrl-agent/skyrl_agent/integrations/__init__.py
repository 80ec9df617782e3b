"""Backends that sample for agents or train them. A backend's framework is imported when the backend is used."""

from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from skyrl_agent.chat import SamplingEngine
from skyrl_agent.config import AgentGeneration
from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import is_vision_model


def create_engine(settings: AgentGeneration, infer_engine: Any, tokenizer: PreTrainedTokenizerBase) -> SamplingEngine:
    """Return the engine for a runner.

    Args:
        settings: `infer_backend` and `backend_config`.
        infer_engine: see `AutoAgentRunner.from_task`.
        tokenizer: the model's tokenizer.

    Raises:
        ConfigError: `infer_engine` is None, or is set although `infer_backend=openai_server` needs none.
    """
    backend = settings.backend_config
    if infer_engine is None and settings.infer_backend != "openai_server":
        raise ConfigError(f"generator.infer_backend={settings.infer_backend} needs its engine; pass it as infer_engine")
    if infer_engine is not None and settings.infer_backend == "openai_server":
        raise ConfigError(
            "generator.infer_backend=openai_server samples with the server in backend_config; pass infer_engine=None"
        )
    if backend is None:
        return cast(SamplingEngine, infer_engine)
    if settings.infer_backend == "openai_server":
        from skyrl_agent.integrations.openai import OpenAIEngine

        assert backend.model_name is not None
        assert backend.api_url is not None
        return OpenAIEngine(backend.api_url, backend.model_name, backend.model_max_len, tokenizer)
    if settings.infer_backend == "verl":
        from skyrl_agent.integrations.verl_engine import VerlEngine

        return VerlEngine(infer_engine, backend.model_max_len)
    from skyrl_agent.integrations.tinker.engine import TinkerEngine

    if isinstance(infer_engine, TinkerEngine):
        return infer_engine
    engine = TinkerEngine(backend.model_max_len, reads_images=is_vision_model(tokenizer.name_or_path))
    engine.load(infer_engine, 0)
    return engine
