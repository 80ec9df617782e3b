"""Fixtures of several packages: a tiny language model with a tokenizer trained on games of Catch, and a short run."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import register_catch
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.models.loading import load_tokenizer
from train_kit import runs
from train_kit.models import PEAKED_VOCABULARY, load_on_cpu, save_tiny_model
from train_kit.processes import forked_multiprocessing
from train_kit.vision_models import save_vision_model


@pytest.fixture(scope="session")
def tiny_head_dim() -> int:
    """Dimension of an attention head of the tiny model."""
    return 16


@pytest.fixture(scope="session")
def tiny_model_path(tiny_head_dim: int, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A Hugging Face folder with a two-layer Qwen3 and its tokenizer."""
    folder = pytestconfig.getoption("--tokenizer")
    tokenizer = load_tokenizer(folder) if folder else None
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"), tokenizer, head_dim=tiny_head_dim)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `tiny_model_path`."""
    return load_tokenizer(str(tiny_model_path))


@pytest.fixture(scope="session")
def chat(tiny_tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
    """The chat template of the tiny tokenizer."""
    return ChatEncoder(tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_model(tiny_model_path: Path) -> PreTrainedModel:
    """The model of `tiny_model_path`, shared by all tests; copy it before changing its weights."""
    return load_on_cpu(tiny_model_path)


@pytest.fixture(scope="session")
def talker(tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The tiny model, biased to end every other turn; with random weights it hardly ever would."""
    model = copy.deepcopy(tiny_model)
    scale = 4 if len(tiny_tokenizer) < PEAKED_VOCABULARY else 6
    model.get_output_embeddings().weight.data[tiny_tokenizer.eos_token_id] *= scale
    return model


@pytest.fixture(scope="session", params=["idefics3", "gemma3"])
def vision_model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny vision-language model, its tokenizer and its image processor."""
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="session")
def vision_tokenizer(vision_model_path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `vision_model_path`."""
    return load_tokenizer(str(vision_model_path))


@pytest.fixture
def catch() -> Iterator[None]:
    """Register the environment `catch`."""
    register_catch()
    yield
    skyrl_gym.envs.deregister("catch")


@pytest.fixture(scope="session")
def catch_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a training file of 8 rows and a validation file of 4."""
    folder = tmp_path_factory.mktemp("catch-data")
    write_dataset(CatchDataset(train_size=8, test_size=4), folder)
    return folder


@pytest.fixture
def catch_run(catch: None, catch_data: Path, tiny_model_path: Path, tmp_path: Path) -> list[str]:
    """Overrides for a run of two steps that writes `skyrl/test_run` in `tmp_path`."""
    return runs.catch_run(tmp_path, model=tiny_model_path, data=catch_data)


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Start the processes of `multiprocessing` from the zygote, in 0.1 s instead of 6 s."""
    with forked_multiprocessing():
        yield
