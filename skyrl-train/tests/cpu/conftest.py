"""Models for several rooms, and the chat template of the tiny tokenizer."""

import pytest
from train_kit.models import OTHER_ARCHITECTURES, create_model, load_on_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.generators.chat_template import ChatEncoder


@pytest.fixture(scope="session", params=sorted(OTHER_ARCHITECTURES))
def other_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Models of architectures other than Qwen3, with random weights and 61 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    create_model(OTHER_ARCHITECTURES[request.param]).save_pretrained(folder)
    return load_on_cpu(folder)


@pytest.fixture(scope="session")
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """The chat template of the tiny tokenizer."""
    return ChatEncoder(tiny_tokenizer)
