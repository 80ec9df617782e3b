"""Requests take turns: one does not wait for all samples of those before it, whatever they are and need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tx_backends import datum, request, sample

from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.config import TorchConfig
from tx.tinker.types import SampleResult

SIZES = {"sample_lanes": 8, "sample_groups": 3, "cache_gib": 0.005}


@pytest.fixture(scope="module", params=["jax", "torch"])
def backend(request: pytest.FixtureRequest, models: Path) -> Backend:
    """JAX with the shapes of its own tests, whose programs are compiled anyway."""
    if request.param == "jax":
        return JaxBackend(models / "qwen3", "org/tiny", JaxConfig(**SIZES))
    return TorchBackend(models / "qwen3", "org/tiny", TorchConfig(**SIZES))


def counts(backend: Backend) -> dict[str, int]:
    """Of samples, requests and free memory."""
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
    assert n_steps <= 8  # until the lanes are free, and as many again; the thousands take more than a hundred
    assert list(found) == ["one"]
    cancel()
    while backend.step():
        pass
    assert counts(backend) == before
    (alone,) = sample(backend, (one, backend.base_weights()))
    assert alone.samples == found["one"].samples


def test_prompts_that_fill_the_cache_stop_nobody(backend: Backend) -> None:
    """Those of requests whose turn is not near are forgotten, and read again."""
    before = counts(backend)
    asked = [
        replace(request(datum(900, i).tokens.tolist(), n=3, max_tokens=9, seed=i), wants_prompt_logprobs=True)
        for i in range(16)
    ]
    found = sample(backend, *((one, backend.base_weights()) for one in asked))
    assert counts(backend) == before
    for i in (0, 15):
        (alone,) = sample(backend, (asked[i], backend.base_weights()))
        assert alone.samples == found[i].samples
        np.testing.assert_array_equal(alone.prompt_logprobs, found[i].prompt_logprobs)
