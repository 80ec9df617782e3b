from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tx_kit.backends import (
    LORA,
    WHOLE,
    Load,
    assert_close_tensors,
    load,
    random_data,
    random_datum,
    sample,
    sample_request,
    saved_tensors,
    target_logprobs,
    train,
)
from tx_kit.models import VOCABULARY, new_model, with_families
from tx_kit.sampling_contract import SamplingContract
from tx_kit.training_contract import TrainingContract

from tx.models import attention, config
from tx.models.config import AdapterConfig, ModelError
from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax import training
from tx.tinker.types import AdamParams, SampleResult

SMOOTH = AdamParams(learning_rate=1e-2, eps=1e-3)  # avoids large steps for gradients that are noise
DATA = random_data()
nightly = pytest.mark.nightly


@pytest.fixture(scope="module")
def loaded(family: str, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """One backend for all tests of a model family, which share its programs. Its model has a single layer, whose
    programs compile in half the time.
    """
    folder = tmp_path_factory.mktemp(family)
    new_model(family, n_layers=1).save_pretrained(folder)
    return load("jax", folder)


@pytest.fixture
def backend(loaded: Backend) -> Backend:
    """A backend without models."""
    for model_id in list(loaded.models()):
        loaded.delete_model(model_id)
    return loaded


@pytest.fixture(name="load")
def load_folder() -> Load:
    return lambda folder: load("jax", folder)


of_qwen3 = pytest.mark.parametrize("family", ["qwen3"], indirect=True)


@with_families("qwen3")  # `test_agreement.py` trains the others by default, too
class TestTraining(TrainingContract):
    pass


@of_qwen3
class TestSampling(SamplingContract):
    pass


@of_qwen3
@pytest.mark.parametrize("lora", [LORA, WHOLE], ids=["adapter", "whole"])
def test_no_program_is_compiled_again(backend: Backend, lora: AdapterConfig, tmp_path: Path) -> None:
    def work(model_id: str, seed: int, temperature: float) -> int:
        """Train a model and sample from it; return the number of programs so far."""
        for _ in range(2):
            train(backend, model_id, random_data(seed))
        backend.optim_step(model_id, AdamParams())  # without any gradient
        target_logprobs(backend, model_id, random_data(seed))
        prompt = random_datum(20, seed).tokens.tolist()
        requests = [sample_request(prompt, n=n, seed=seed, temperature=temperature, top_k=n + seed) for n in (1, 5)]
        sample(backend, *((one, backend.weights_of(model_id)) for one in requests))
        return backend.counts()["programs compiled"]

    backend.create_model("a", lora)
    n_compiled = work("a", 1, 1.0)
    backend.capture("a", with_optimizer=True)(tmp_path)
    backend.load_model("resumed", tmp_path, with_optimizer=True)
    backend.load_model("fresh", tmp_path, with_optimizer=False)
    backend.create_model("b", AdapterConfig(rank=5, seed=2) if lora.rank else WHOLE)
    n_loaded = backend.counts()["programs compiled"]  # placing new arrays compiles some
    for number, model_id in enumerate(("resumed", "fresh", "b")):
        assert work(model_id, 2 + number, 0.5) == n_loaded
    assert n_loaded - n_compiled < 10
    target_logprobs(backend, "a", [random_datum(90)])  # a length that no other test has
    assert backend.counts()["programs compiled"] == n_loaded + 1


Outcome = tuple[list[float], SampleResult | None]
"""The losses of three steps, and a sample after them."""


def train_and_sample(backend: Backend, *, samples: bool = True) -> Outcome:
    """Train the model `m` for three steps, and sample from it."""
    losses = [train(backend, "m", DATA, SMOOTH)]
    n_compiled = backend.counts()["programs compiled"]
    losses += [train(backend, "m", DATA, SMOOTH) for _ in range(2)]
    assert backend.counts()["programs compiled"] == n_compiled
    if not samples:
        return losses, None
    request = sample_request(random_datum(30).tokens.tolist(), temperature=0.0, scores_prompt=True)
    return losses, sample(backend, (request, backend.weights_of("m")))[0]


def save_first_step(backend: Backend, lora: AdapterConfig, folder: Path) -> Path:
    folder.mkdir()
    backend.create_model("m", lora)
    train(backend, "m", DATA)
    backend.capture("m", with_optimizer=True)(folder)
    return folder


def assert_close(one: Outcome, other: Outcome) -> None:
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    if one[1] is None or other[1] is None:
        return
    (first,), (second,) = one[1].samples, other[1].samples
    assert list(first.tokens) == list(second.tokens)
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    np.testing.assert_allclose(one[1].prompt_logprobs, other[1].prompt_logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "n_at_once"),
    [("llama", 16), pytest.param("qwen3", 7, marks=nightly), pytest.param("qwen3_moe", 7, marks=nightly)],
)
def test_memory_settings_change_no_result(
    models: Path, family: str, n_at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scanned layers, rematerialization, and chunked logits and attention give the same results.

    By default, the next test scans a mixture of experts.
    """
    plain = load("jax", models / family)
    start = save_first_step(plain, LORA, tmp_path / "start")
    expected = train_and_sample(plain)
    written = saved_tensors(plain, "m", tmp_path / "plain")
    monkeypatch.setattr(config, "MAX_UNROLLED", 0)
    monkeypatch.setattr(training, "MAX_LOGITS", n_at_once * VOCABULARY)  # positions that divide the length or not
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    thrifty = load("jax", models / family, gradient_checkpointing=True)
    thrifty.load_model("m", start, with_optimizer=True)
    assert_close(train_and_sample(thrifty), expected)
    assert_close_tensors(saved_tensors(thrifty, "m", tmp_path / "thrifty"), written)


@pytest.mark.parametrize(
    ("family", "n_fsdp", "n_tp", "lora", "samples"),
    [
        ("qwen3", 2, 2, WHOLE, True),
        ("qwen3_moe", 1, 4, LORA, False),
        pytest.param("llama", 4, 1, LORA, True, marks=nightly),
        pytest.param("qwen3_moe", 1, 4, LORA, True, marks=nightly),
    ],
)
def test_several_devices_agree_with_one(
    models: Path,
    family: str,
    n_fsdp: int,
    n_tp: int,
    lora: AdapterConfig,
    samples: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """They resume from a single device's checkpoint, with fewer data than rows, and vice versa."""
    one = load("jax", models / family)
    start = save_first_step(one, lora, tmp_path / "start")
    expected = train_and_sample(one, samples=samples)
    written = saved_tensors(one, "m", tmp_path / "one")
    with monkeypatch.context() as patch:
        patch.setattr(config, "MAX_UNROLLED", 0)
        sizes = {"fully_sharded_data_parallel_size": n_fsdp, "tensor_parallel_size": n_tp}
        several: Any = load("jax", models / family, **sizes)
        down = several.base_weights().params.blocks[0]["down"]
        assert {shard.data.size * 4 for shard in down.addressable_shards} == {down.size}
        several.load_model("m", start, with_optimizer=True)
        assert_close(train_and_sample(several, samples=samples), expected)
        assert_close_tensors(saved_tensors(several, "m", tmp_path / "several"), written)
    one.load_model("moved", tmp_path / "several", with_optimizer=True)
    np.testing.assert_allclose(*([train(one, name, DATA) for _ in range(2)] for name in ("m", "moved")), rtol=1e-5)


def test_more_devices_than_available(models: Path) -> None:
    with pytest.raises(ModelError, match=r"size=3 × tensor_parallel_size=2 needs 6 devices, but there are 4 \(cpu\)"):
        load("jax", models / "llama", fully_sharded_data_parallel_size=3, tensor_parallel_size=2)
