from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from tx_kit.backend_contract import SamplingContract, TrainingContract
from tx_kit.backends import LORA, STEP, Load, datum, learn, losses, request, sample, some_data
from tx_kit.models import SHAPE, VOCABULARY

from tx.models.config import LoraConfig
from tx.tinker.backends.factory import new_backend
from tx.tinker.backends.torch import sampler, training
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.config import TorchConfig
from tx.tinker.types import Datum, SampleRequest, SamplingParams, UserError

CONFIG = TorchConfig(sample_lanes=64, sample_groups=3, cache_gib=0.003)
WHOLE = LoraConfig(rank=0)
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 8},
    "gpt_neox": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4},
    "phi3": {"head_dim": 8, "pad_token_id": 0},
}


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TorchBackend:
    """One backend for all tests of a model family."""
    return TorchBackend(folder, "org/tiny", CONFIG)


@pytest.fixture
def backend(loaded: TorchBackend) -> Iterator[TorchBackend]:
    """A backend without models. Checks that the test leaves nothing in the cache."""
    for model_id in list(loaded.models()):
        loaded.delete_model(model_id)
    before = loaded.counts()
    yield loaded
    assert loaded.counts() == before


@pytest.fixture
def load() -> Load:
    return lambda folder: TorchBackend(folder, "org/tiny", CONFIG)


class TestTraining(TrainingContract):
    pass


@pytest.mark.parametrize("family", ["qwen3"], indirect=True)
class TestSampling(SamplingContract):
    pass


def new(backend: TorchBackend, model_id: str, lora: LoraConfig = LORA) -> str:
    backend.create_model(model_id, lora)
    return model_id


def test_memory_settings_change_no_result(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = SampleRequest(datum(70).tokens.tolist(), SamplingParams(max_tokens=1), wants_prompt_logprobs=True)

    def results(one: TorchBackend) -> tuple[list[np.ndarray], np.ndarray | None]:
        learn(one, new(one, "m"), some_data())
        return losses(one, "m", some_data()), sample(one, (ask, one.weights_of("m")))[0].prompt_logprobs

    trained, sampled = results(backend)
    thrifty = TorchConfig(micro_batch_tokens=64, gradient_checkpointing=True, sample_lanes=2, cache_gib=0.001)
    for module in (training, sampler):
        monkeypatch.setattr(module, "CHUNK_LOGITS", 7 * VOCABULARY)
    monkeypatch.setattr(sampler, "PROMPT_CHUNK", 16)
    other_trained, other_sampled = results(TorchBackend(backend.base_model.folder, "org/tiny", thrifty))
    for one, other in zip(trained, other_trained, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    np.testing.assert_allclose(sampled, other_sampled, atol=2e-5)


def test_adapter_config_of_peft(backend: TorchBackend, tmp_path: Path) -> None:
    backend.save_weights(new(backend, "m", LoraConfig(rank=4, train_mlp=False)), tmp_path)
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert adapter_config["target_modules"][:4] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["base_model_name_or_path"]) == (
        4,
        32.0,
        "org/tiny",
    )
    assert "rank_pattern" not in adapter_config


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str, tmp_path: Path) -> None:
    """With fused projections, other names, sliding windows or experts, sampling uses the trained weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(name, **{**SHAPE, "vocab_size": VOCABULARY, "bos_token_id": 1, **OTHERS[name]})
    ).save_pretrained(tmp_path)
    backend = TorchBackend(tmp_path, name, CONFIG)
    new(backend, "m")
    first, *_, last = [learn(backend, "m", some_data()) for _ in range(4)]
    assert last < 0.98 * first
    tokens = datum(100).tokens
    ask = SampleRequest(tokens.tolist(), SamplingParams(max_tokens=9, seed=1), n_samples=3, wants_prompt_logprobs=True)
    weights = backend.weights_of("m")
    found, _ = sample(backend, (ask, weights), (request(n=2, max_tokens=9), weights))
    targets = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(99, np.float32)})
    np.testing.assert_allclose(found.prompt_logprobs[1:], losses(backend, "m", [targets])[0], atol=1e-5)
    assert found.samples == sample(backend, (ask, weights))[0].samples


def test_the_head_alone(models: Path, tmp_path: Path) -> None:
    head = LoraConfig(rank=4, train_attn=False, train_mlp=False)
    tied, untied = (TorchBackend(models / name, "org/tiny", CONFIG) for name in ("qwen3", "llama"))
    with pytest.raises(
        UserError, match="has nothing to train with train_unembed"
    ):  # the head is tied to the embeddings
        tied.create_model("m", head)
    untied.save_weights(new(untied, "m", head), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["lm_head"]


def test_the_factory_creates_it_by_name(models: Path) -> None:
    settings = {"dtype": "bfloat16", "cache_gib": 0.001}
    backend = new_backend("torch", models / "llama", settings, "org/tiny")
    assert isinstance(backend, TorchBackend)
    assert (backend.base_model.max_context, backend.base_model.eos_ids) == (1024, (2,))
    backend.create_model("m", LORA)
    first, *_, last = [learn(backend, "m", some_data(), STEP) for _ in range(4)]
    assert last < 0.95 * first
    (found,) = sample(backend, (request(max_tokens=9), backend.weights_of("m")))
    assert len(found.samples[0].tokens) == 9
