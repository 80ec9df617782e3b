from pathlib import Path

import pytest
from train_kit.models import save_tiny_model
from train_kit.vision_models import save_vision_model


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a two-layer Qwen3 and its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session", params=["idefics3", "gemma3"])
def vision_model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny vision-language model, its tokenizer and its image processor."""
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)
