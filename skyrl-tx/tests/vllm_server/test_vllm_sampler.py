"""Run by `make test-vllm`: a real vLLM server, in its own environment, samples from what JAX trains here."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import tinker
from tx_kit.backends import load, random_data, sample, train
from tx_kit.models import new_model
from tx_kit.processes import process

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend
from tx.tinker.backends.vllm import VllmSampler, VllmWeights
from tx.tinker.types import SampleRequest, SampleResult, SamplingParams, TinkerError, UserError

PYTHON = Path(__file__).parents[3] / ".venv-vllm/bin/python"
LORA = AdapterConfig(rank=8, seed=3, train_unembed=False)
PROMPT = [5, 6, 7, 8, 9, 10]
START_SEC, SECONDS = 240, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are large enough for vLLM's attention on a CPU."""
    folder = tmp_path_factory.mktemp("model")
    new_model("llama", head_dim=32).save_pretrained(folder)
    return folder


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[str]:
    """Run a vLLM server; yield its address."""
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", "0"]
    command += ["--skip-tokenizer-init", "--dtype", "float32"]
    command += ["--enable-lora", "--max-lora-rank", "8", "--max-model-len", "256", "--enforce-eager"]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield address_of(server, log)
    finally:
        server.terminate()
        server.wait(60)


def address_of(server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server is healthy; return its address, whose port the system chooses."""
    deadline = time.monotonic() + START_SEC
    while time.monotonic() < deadline and server.poll() is None:
        for one in psutil.Process(server.pid).net_connections("tcp"):
            url = f"http://127.0.0.1:{one.laddr.port}"
            if one.status == psutil.CONN_LISTEN and is_healthy(url):
                return url
        time.sleep(0.5)
    raise AssertionError(log.read_text()[-5000:])


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(folder, tmp_path_factory.mktemp("log") / "vllm.log") as address:
        yield address


@pytest.fixture(scope="module")
def backend(folder: Path) -> Backend:
    backend = load("jax", folder)
    backend.create_model("m", LORA)
    for seed in range(3):
        train(backend, "m", random_data(seed))
    return backend


@pytest.fixture
def sampler(backend: Backend, url: str, tmp_path: Path) -> Iterator[VllmSampler]:
    sampler = VllmSampler(f"{url}/v1", "EMPTY", tmp_path / "adapters", SECONDS)
    yield sampler
    sampler.close()


def exported(sampler: VllmSampler, backend: Backend, folder: Path, name: str = "m") -> VllmWeights:
    """Return the current weights of a model."""
    saved = folder / f"export-{len(list(folder.iterdir()))}"
    saved.mkdir()
    backend.capture(name, with_optimizer=False)(saved)
    return sampler.load_weights(saved)


def scored() -> SampleRequest:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    return SampleRequest(PROMPT, params, wants_prompt_logprobs=True, n_top_prompt=3, n_top_sampled=3)


def assert_alike(one: SampleResult, other: SampleResult) -> None:
    for a, b in zip(one.samples, other.samples, strict=True):
        assert list(a.tokens) == list(b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-3)
        assert a.top is not None
        assert b.top is not None
        np.testing.assert_array_equal(a.top.tokens, b.top.tokens)
    assert one.prompt_logprobs is not None
    np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-3)
    assert one.top_prompt is not None
    assert other.top_prompt is not None
    np.testing.assert_array_equal(one.top_prompt.tokens, other.top_prompt.tokens)


def test_samples_match_the_backends(backend: Backend, sampler: VllmSampler, tmp_path: Path) -> None:
    for elsewhere, here in (
        (sampler.base_weights(), backend.base_weights()),
        (exported(sampler, backend, tmp_path), backend.weights_of("m")),
    ):
        (theirs,) = sample(sampler, (scored(), elsewhere))
        (ours,) = sample(backend, (scored(), here))
        assert_alike(theirs, ours)


def test_weights_are_immutable_and_loaded_from_folders(backend: Backend, sampler: VllmSampler, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    backend.capture("m", with_optimizer=False)(tmp_path / "saved")
    frozen = [exported(sampler, backend, tmp_path), sampler.load_weights(tmp_path / "saved")]
    before = [sample(sampler, (scored(), weights))[0] for weights in frozen]
    train(backend, "m", random_data(9))
    after = [sample(sampler, (scored(), weights))[0] for weights in (*frozen, exported(sampler, backend, tmp_path))]
    assert_alike(before[0], before[1])
    assert_alike(before[0], after[0])
    with pytest.raises(AssertionError):
        assert_alike(before[0], after[2])


def test_stop_conditions_and_seeds(sampler: VllmSampler) -> None:
    params = SamplingParams(max_tokens=12, seed=4)
    one, again = sample(sampler, *[(SampleRequest(PROMPT, params, n_samples=4), None)] * 2)
    assert [list(x.tokens) for x in one.samples] == [list(x.tokens) for x in again.samples]
    assert len({tuple(x.tokens) for x in one.samples}) == 4
    assert {x.is_stopped for x in one.samples} == {False}
    fifth = one.samples[0].tokens[4]
    params = SamplingParams(max_tokens=12, seed=4, stop_tokens=(fifth,))
    (stopped,) = sample(sampler, (SampleRequest(PROMPT, params, n_samples=4), None))
    tokens = list(one.samples[0].tokens)
    assert list(stopped.samples[0].tokens) == tokens[: tokens.index(fifth) + 1]
    assert stopped.samples[0].is_stopped


def test_a_restarted_server_reloads_adapters(backend: Backend, sampler: VllmSampler, url: str, tmp_path: Path) -> None:
    weights = exported(sampler, backend, tmp_path)
    (before,) = sample(sampler, (scored(), weights))
    httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": weights.name}).raise_for_status()
    (after,) = sample(sampler, (scored(), weights))
    assert_alike(before, after)


def test_unreferenced_adapters_are_deleted(backend: Backend, sampler: VllmSampler, url: str, tmp_path: Path) -> None:
    weights = exported(sampler, backend, tmp_path)
    sample(sampler, (scored(), weights))
    name, folder = weights.name, weights.folder
    assert name in httpx.get(f"{url}/v1/models").text
    del weights
    deadline = time.monotonic() + 20
    while (folder.exists() or name in httpx.get(f"{url}/v1/models").text) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    assert name not in httpx.get(f"{url}/v1/models").text


def test_the_server_uses_vllm(folder: Path, url: str, tmp_path: Path) -> None:
    with process(tmp_path / "state", "--base-model", str(folder), "--external-inference-url", url) as server:
        client = server.sdk()
        trainer = client.create_lora_training_client(str(folder), rank=8, train_unembed=False).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=5, temperature=0.0)
        found = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 1, params).result()
        assert len(found.sequences[0].tokens) == 5
        (adapter,) = (tmp_path / "state" / "external").iterdir()
        assert adapter.name in httpx.get(f"{url}/v1/models").text
        client.close(status="success").result()


def test_unsupported_requests(backend: Backend, sampler: VllmSampler, tmp_path: Path) -> None:
    backend.create_model("whole", AdapterConfig(rank=0))
    with pytest.raises(UserError, match="samples from adapters only"):
        exported(sampler, backend, tmp_path, "whole")
    nobody = VllmSampler("http://127.0.0.1:9", "EMPTY", tmp_path, SECONDS)
    with pytest.raises(TinkerError, match=r"the external server at http://127\.0\.0\.1:9 failed"):
        sample(nobody, (scored(), exported(nobody, backend, tmp_path)))
    nobody.close()
