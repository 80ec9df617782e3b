"""Models for several rooms."""

import pytest
from train_kit.models import OTHER_ARCHITECTURES, create_model, load_on_cpu
from transformers import PreTrainedModel


@pytest.fixture(scope="session", params=sorted(OTHER_ARCHITECTURES))
def other_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Models of architectures other than Qwen3, with random weights and 61 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    create_model(OTHER_ARCHITECTURES[request.param]).save_pretrained(folder)
    return load_on_cpu(folder)
