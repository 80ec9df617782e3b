"""Requests take turns: none waits for all samples of earlier requests, whatever their size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tx_kit.backends import datum, request, sample

from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.config import TorchConfig
from tx.tinker.types import SampleResult

SIZES = {"sample_lanes": 8, "sample_groups": 3, "cache_gib": 0.005}


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest, models: Path) -> Backend:
    """JAX has the shapes of its own tests, whose programs are compiled anyway."""
    if request.param == "jax":
        return JaxBackend(models / "qwen3", "org/tiny", JaxConfig(**SIZES))
    return TorchBackend(models / "qwen3", "org/tiny", TorchConfig(**SIZES))


def counts(backend: Backend) -> dict[str, int]:
    """Return the counts of samples, requests and free memory."""
    return {name: n for name, n in backend.counts().items() if name != "programs compiled"}


def test_one_sample_does_not_wait_for_thousands(backend: Backend) -> None:
    found: dict[str, SampleResult | Exception] = {}
    before = counts(backend)
    many, one = request(n=2000, max_tokens=20), request(max_tokens=20, seed=2)
    cancel = backend.sample(many, backend.base_weights(), lambda result: found.update(many=result))
    for _ in range(2):
        backend.step()
    backend.sample(one, backend.base_weights(), lambda result: found.update(one=result))
    n_steps = 0
    while "one" not in found:
        n_steps += backend.step()
    assert n_steps <= 8  # until lanes are free, and as many again; the thousands of samples take more than a hundred
    assert list(found) == ["one"]
    cancel()
    while backend.step():
        pass
    assert counts(backend) == before
    (alone,) = sample(backend, (one, backend.base_weights()))
    assert alone.samples == found["one"].samples


def test_prompts_that_fill_the_cache_do_not_block_others(backend: Backend) -> None:
    """Prompts of requests that are far from their turn are evicted, and prefilled again."""
    before = counts(backend)
    requests = [
        replace(request(datum(900, i).tokens.tolist(), n=3, max_tokens=9, seed=i), wants_prompt_logprobs=True)
        for i in range(16)
    ]
    found = sample(backend, *((one, backend.base_weights()) for one in requests))
    assert counts(backend) == before
    for i in (0, 15):
        (alone,) = sample(backend, (requests[i], backend.base_weights()))
        assert alone.samples == found[i].samples
        np.testing.assert_array_equal(alone.prompt_logprobs, found[i].prompt_logprobs)
