from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tx_kit.backend_contract import SamplingContract, TrainingContract
from tx_kit.backends import (
    LORA,
    MIDDLE,
    WHOLE,
    Load,
    assert_close_tensors,
    datum,
    learn,
    losses,
    next_tokens,
    request,
    sample,
    some_data,
    tensors_of,
)
from tx_kit.models import VOCABULARY

from tx.models import attention, config
from tx.models.config import LoraConfig
from tx.tinker.backends.factory import new_backend
from tx.tinker.backends.jax import training
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.types import AdamParams, Datum, SampleRequest, SampleResult, SamplingParams

SMOOTH = AdamParams(learning_rate=1e-2, eps=1e-3)  # avoids large steps for gradients that are noise
GREEDY = SampleRequest(
    datum(30).tokens.tolist(), SamplingParams(max_tokens=8, temperature=0.0), wants_prompt_logprobs=True
)
CONFIG = JaxConfig(sample_lanes=8, sample_groups=3, cache_gib=0.005)
of_one_kind = pytest.mark.parametrize("family", ["qwen3"], indirect=True)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> JaxBackend:
    """All tests of a model family share the compiled programs."""
    return load_backend(folder)


@pytest.fixture
def backend(loaded: JaxBackend) -> JaxBackend:
    """A backend without models."""
    for model_id in list(loaded.models()):
        loaded.delete_model(model_id)
    return loaded


@pytest.fixture
def load() -> Load:
    return load_backend


def load_backend(folder: Path, **settings: Any) -> JaxBackend:
    return JaxBackend(folder, "org/tiny", CONFIG.model_copy(update=settings))


class TestTraining(TrainingContract):
    pass


@of_one_kind
class TestSampling(SamplingContract):
    pass


@of_one_kind
def test_no_program_is_compiled_again(backend: JaxBackend) -> None:
    def work(seed: int, lora: LoraConfig, temperature: float) -> None:
        backend.create_model(str(seed), lora)
        for _ in range(2):
            learn(backend, str(seed), some_data(seed))
        losses(backend, str(seed), some_data(seed))
        prompt = datum(20, seed).tokens.tolist()
        requests = [request(prompt, n=n, seed=seed, temperature=temperature, top_k=n + seed) for n in (1, 5)]
        sample(backend, *((one, backend.weights_of(str(seed))) for one in requests))

    work(1, LORA, 1.0)
    n_compiled = backend.counts()["programs compiled"]
    work(2, LoraConfig(rank=5, seed=2), 0.5)
    assert backend.counts()["programs compiled"] == n_compiled
    losses(backend, "1", [datum(90)])  # a length that no other test has
    assert backend.counts()["programs compiled"] == n_compiled + 1


def train_and_sample(backend: JaxBackend, data: Sequence[Datum]) -> tuple[list[float], SampleResult]:
    """Return the losses of the model `m` before each of three steps, and a sample after them."""
    found = [learn(backend, "m", data, SMOOTH) for _ in range(3)]
    return found, sample(backend, (GREEDY, backend.weights_of("m")))[0]


def save_first_step(backend: JaxBackend, lora: LoraConfig, data: Sequence[Datum], folder: Path) -> Path:
    """Save the model `m` after a step to a new folder."""
    folder.mkdir()
    backend.create_model("m", lora)
    learn(backend, "m", data)
    backend.save_model("m", folder)
    return folder


def assert_close(one: tuple[list[float], SampleResult], other: tuple[list[float], SampleResult]) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    (first,), (second,) = one[1].samples, other[1].samples
    assert list(first.tokens) == list(second.tokens)
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    np.testing.assert_allclose(one[1].prompt_logprobs, other[1].prompt_logprobs, atol=1e-4)


@pytest.mark.parametrize(("family", "n_at_once"), [("qwen3", 7), ("llama", 16), ("qwen3_moe", 7)], indirect=["family"])
def test_memory_settings_change_no_result(
    backend: JaxBackend, n_at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scanned layers, rematerialization, and chunked logits and attention give the same results."""
    data = some_data(lengths=MIDDLE)
    start = save_first_step(backend, LORA, data, tmp_path / "start")
    expected = train_and_sample(backend, data)
    written = tensors_of(backend, "m", tmp_path / "plain")
    monkeypatch.setattr(config, "MAX_UNROLLED", 0)
    monkeypatch.setattr(training, "MAX_LOGITS", n_at_once * VOCABULARY)  # positions that divide the length or not
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    thrifty = load_backend(backend.base_model.folder, gradient_checkpointing=True)
    thrifty.load_model("m", start, with_optimizer=True)
    assert_close(train_and_sample(thrifty, data), expected)
    assert_close_tensors(tensors_of(thrifty, "m", tmp_path / "thrifty"), written)


@pytest.mark.parametrize(
    ("family", "n_fsdp", "n_tp", "lora"),
    [("qwen3", 2, 2, WHOLE), ("llama", 4, 1, LORA), ("qwen3_moe", 1, 4, LORA)],
    indirect=["family"],
)
def test_several_devices_agree_with_one(
    backend: JaxBackend, n_fsdp: int, n_tp: int, lora: LoraConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They resume from a single device's checkpoint, with fewer data than rows, and vice versa."""
    data = some_data(lengths=MIDDLE)
    start = save_first_step(backend, lora, data, tmp_path / "start")
    expected = train_and_sample(backend, data)
    written = tensors_of(backend, "m", tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr(config, "MAX_UNROLLED", 0)
        sizes = {"fully_sharded_data_parallel_size": n_fsdp, "tensor_parallel_size": n_tp}
        several = load_backend(backend.base_model.folder, **sizes)
        down = several.base_weights().params.blocks[0]["down"]
        assert {shard.data.size * 4 for shard in down.addressable_shards} == {down.size}
        several.load_model("m", start, with_optimizer=True)
        assert_close(train_and_sample(several, data), expected)
        assert_close_tensors(tensors_of(several, "m", tmp_path / "several"), written)
    backend.load_model("moved", tmp_path / "several", with_optimizer=True)
    np.testing.assert_allclose(*([learn(backend, name, data) for _ in range(2)] for name in ("m", "moved")), rtol=1e-5)


def test_bfloat16(models: Path) -> None:
    """Models learn and are sampled from with similar results."""
    settings = {"dtype": "bfloat16", "cache_gib": 0.001, "sample_lanes": 8}
    backends = new_backend("jax", models / "qwen3", settings, "org/tiny"), load_backend(models / "qwen3")
    prompt = datum(49).tokens
    data = [next_tokens(prompt), *some_data(lengths=MIDDLE[:2])]
    found, exact = [], []
    for backend in backends:
        backend.create_model("m", LORA)
        found.append([learn(backend, "m", data) for _ in range(4)])
        ask = SampleRequest(prompt.tolist(), SamplingParams(max_tokens=9, seed=0), wants_prompt_logprobs=True)
        (sampled,) = sample(backend, (ask, backend.weights_of("m")))
        assert len(sampled.samples[0].tokens) == 9
        exact.append(sampled.prompt_logprobs[1:])
    np.testing.assert_allclose(*found, rtol=1e-2)
    np.testing.assert_allclose(*exact, atol=0.2)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(*exact, atol=1e-5)


def test_more_devices_than_available(models: Path) -> None:
    with pytest.raises(ValueError, match=r"size=3 × tensor_parallel_size=2 needs 6 devices, and there are 4 \(cpu\)"):
        JaxBackend(models / "llama", "org/tiny", JaxConfig(fully_sharded_data_parallel_size=3, tensor_parallel_size=2))
