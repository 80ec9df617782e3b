import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from train_kit.architectures import each_architecture, stated, tiny_config
from transformers import AutoModelForCausalLM
from tx_kit.backends import (
    LORA,
    Load,
    assert_close_arrays,
    load,
    next_tokens,
    random_data,
    random_datum,
    sample,
    sample_request,
    target_logprobs,
    train,
)
from tx_kit.models import VOCABULARY
from tx_kit.sampling_contract import SamplingContract
from tx_kit.training_contract import TrainingContract

from tx.models.config import AdapterConfig, ModelError, read_config
from tx.tinker.backends.base import Backend
from tx.tinker.backends.torch import sampler, training

SPECIAL_TOKENS: Any = SimpleNamespace(eos_token_id=2, pad_token_id=0)
LANES = {"sample_lanes": 64, "cache_gib": 0.003}
"""With 8, the last bit of a log-prob depends on the lane of its sample."""


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Backend:
    """One backend for all tests of a model family."""
    return load("torch", folder, **LANES)


@pytest.fixture
def backend(loaded: Backend) -> Iterator[Backend]:
    """A backend without models. Checks that the test leaves nothing in the cache."""
    for model_id in list(loaded.models()):
        loaded.delete_model(model_id)
    before = loaded.counts()
    yield loaded
    assert loaded.counts() == before


@pytest.fixture(name="load")
def load_folder() -> Load:
    return lambda folder: load("torch", folder, **LANES)


class TestTraining(TrainingContract):
    pass


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
class TestSampling(SamplingContract):
    pass


def test_memory_settings_change_no_result(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_data(lengths=(5, 40, 31, 64, 20, 3))
    request = sample_request(random_datum(70).tokens.tolist(), max_tokens=1, scores_prompt=True)

    def results(one: Backend) -> list[np.ndarray]:
        """Return log-probs of targets after a step, and those of a prompt."""
        one.create_model("m", LORA)
        train(one, "m", data)
        (sampled,) = sample(one, (request, one.weights_of("m")))
        assert sampled.prompt_logprobs is not None
        return [*target_logprobs(one, "m", data), sampled.prompt_logprobs[1:]]

    expected = results(backend)
    thrifty = {"micro_batch_tokens": 64, "gradient_checkpointing": True, "sample_lanes": 2, "cache_gib": 0.001}
    for module in (training, sampler):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 7 * VOCABULARY)
    monkeypatch.setattr(sampler, "PROMPT_CHUNK", 16)
    assert_close_arrays(results(load("torch", backend.base_model.folder, **thrifty)), expected, 2e-5)


def test_adapter_config_of_peft(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("m", AdapterConfig(rank=4, train_mlp=False))
    backend.capture("m", with_optimizer=False)(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["target_modules"][:4] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (saved["r"], saved["lora_alpha"], saved["base_model_name_or_path"]) == (4, 32.0, "org/tiny")
    assert "rank_pattern" not in saved


@pytest.mark.parametrize("family", ["llama"], indirect=True)
def test_the_head_alone(backend: Backend, tmp_path: Path) -> None:
    backend.create_model("m", AdapterConfig(rank=4, train_attn=False, train_mlp=False))
    backend.capture("m", with_optimizer=False)(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["lm_head"]


def test_a_folder_without_weights_is_an_error_of_the_model(shallow_model: Path, tmp_path: Path) -> None:
    shutil.copytree(shallow_model, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="base_model="):
        load("torch", tmp_path / "model")


@each_architecture({"gemma3_text", "gemma2", "mixtral", "phi3"})
def test_each_architecture_samples_with_trained_weights_or_is_rejected(name: str, tmp_path: Path) -> None:
    """Some have fused projections, other names, sliding windows or experts."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(name, SPECIAL_TOKENS)).save_pretrained(tmp_path)
    cell = stated()[name]["tx"]
    if cell != "both":
        with pytest.raises(ModelError, match=r"architecture .* is not supported"):
            read_config(tmp_path)
    if cell == "no":
        with pytest.raises(ModelError, match=r"is not supported by --backend torch: .*; use another model|base_model="):
            load("torch", tmp_path)
        return
    backend = load("torch", tmp_path)
    backend.create_model("m", LORA)
    first, *_, last = [train(backend, "m", random_data()) for _ in range(4)]
    assert last < 0.98 * first
    tokens = random_datum(100).tokens
    request = sample_request(tokens.tolist(), n=3, max_tokens=9, scores_prompt=True)
    weights = backend.weights_of("m")
    found, _ = sample(backend, (request, weights), (sample_request(n=2, max_tokens=9), weights))
    assert found.prompt_logprobs is not None
    trained = target_logprobs(backend, "m", [next_tokens(tokens)])[0]
    np.testing.assert_allclose(found.prompt_logprobs[1:], trained, atol=1e-5)
    assert found.samples == sample(backend, (request, weights))[0].samples
