"""Models for several rooms, and the chat template of the tiny tokenizer."""

import copy

import pytest
from train_kit.models import OTHER_ARCHITECTURES, PEAKED_VOCABULARY, create_model, load_on_cpu
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.generators.chat_template import ChatEncoder


@pytest.fixture(scope="session", params=sorted(OTHER_ARCHITECTURES))
def other_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """Models of architectures other than Qwen3, with random weights and 61 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    create_model(OTHER_ARCHITECTURES[request.param]).save_pretrained(folder)
    return load_on_cpu(folder)


@pytest.fixture(scope="session")
def talker(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The tiny model, biased to end every other turn; with random weights it hardly ever would."""
    model = copy.deepcopy(tiny_model)
    scale = 4 if len(tiny_tokenizer) < PEAKED_VOCABULARY else 6
    model.get_output_embeddings().weight.data[tiny_tokenizer.eos_token_id] *= scale
    return model


@pytest.fixture(scope="session")
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """The chat template of the tiny tokenizer."""
    return ChatEncoder(tiny_tokenizer)
