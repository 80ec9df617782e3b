"""Load backends, and run passes and samples on them with small data."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend, Sampler, Weights
from tx.tinker.backends.factory import BackendName, new_backend
from tx.tinker.types import AdamParams, Datum, Pass, PassResult, SampleRequest, SampleResult, SamplingParams
from tx_kit.models import VOCABULARY

NAME = "org/tiny"
SIZES = {"sample_lanes": 8, "sample_groups": 3, "cache_gib": 0.005}
"""Settings of all backends unless a test is about them, so that they share their compiled programs."""
LORA = AdapterConfig(rank=8, seed=3)
WHOLE = AdapterConfig(rank=0)
STEP = AdamParams(learning_rate=1e-2)
LENGTHS = (40, 33, 48)
"""The lengths of three sequences. On JAX they are a micro-batch of 4 × 48 tokens, the shape that most tests use, since
each shape takes seconds to compile.
"""
Load = Callable[[Path], Backend]
"""Loads a backend with the model in a folder."""


def load(backend: BackendName, folder: Path, **settings: Any) -> Backend:
    return new_backend(backend, folder, SIZES | settings, NAME)


def random_datum(length: int, seed: int = 0, weight: float = 1.0) -> Datum:
    rng = np.random.default_rng(seed * 1000 + length)
    tokens, targets = rng.integers(0, VOCABULARY, (2, length)).astype(np.int32)
    return Datum(tokens, {"target_tokens": targets, "weights": np.full(length, weight, np.float32)})


def random_data(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Datum]:
    return [random_datum(length, seed) for length in lengths]


def next_tokens(tokens: np.ndarray) -> Datum:
    """Return a datum in which each token predicts the next."""
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})


def run_passes(backend: Backend, *passes: Pass) -> list[PassResult]:
    results: dict[int, PassResult] = {}
    waiting = deque((number, backend.compute(one)) for number, one in enumerate(passes))
    while waiting:
        number, parts = waiting.popleft()
        result = next(parts)
        if result is None:
            waiting.append((number, parts))
        else:
            results[number] = result
    return [results[number] for number in range(len(passes))]


def run_pass(backend: Backend, model_id: str, data: Sequence[Datum], loss_fn: str = "cross_entropy") -> PassResult:
    (result,) = run_passes(backend, Pass(model_id, data, loss_fn))
    return result


def train(backend: Backend, model_id: str, data: Sequence[Datum], params: AdamParams = STEP) -> float:
    """Run a training step; return the loss before it."""
    result = run_pass(backend, model_id, data)
    backend.optim_step(model_id, params)
    return result.loss


def target_logprobs(backend: Backend, model_id: str, data: Sequence[Datum]) -> list[np.ndarray]:
    """Return the current log-probs of the targets, from a forward pass."""
    (result,) = run_passes(backend, Pass(model_id, data, "cross_entropy", is_forward_only=True))
    return list(result.logprobs)


def saved_tensors(backend: Backend, model_id: str, folder: Path) -> dict[str, np.ndarray]:
    """Save weights and moments to a new folder, and load them."""
    folder.mkdir()
    backend.capture(model_id, with_optimizer=True)(folder)
    return {
        f"{file.name} {name}": one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }


def sample_request(
    prompt: Sequence[int] = (5, 6, 7), *, n: int = 1, max_tokens: int = 8, scores_prompt: bool = False, **params: Any
) -> SampleRequest:
    return SampleRequest(
        prompt, SamplingParams(max_tokens=max_tokens, **({"seed": 1} | params)), n, wants_prompt_logprobs=scores_prompt
    )


def sample(sampler: Sampler, *requests: tuple[SampleRequest, Weights]) -> list[SampleResult]:
    found: dict[int, SampleResult | Exception] = {}
    for number, (request, weights) in enumerate(requests):
        sampler.sample(request, weights, lambda result, number=number: found.update({number: result}))  # type: ignore[misc]
    while sampler.step():
        pass
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[number] for number in range(len(requests))]  # type: ignore[misc]


def prompt_logprobs(backend: Backend, prompt: np.ndarray, weights: Weights) -> np.ndarray:
    """Return the log-probs of all tokens but the first."""
    (found,) = sample(backend, (sample_request(prompt.tolist(), max_tokens=1, scores_prompt=True), weights))
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    return found.prompt_logprobs[1:]


def running_and_waiting(backend: Backend) -> tuple[int, int]:
    counts = backend.counts()
    return counts["samples running"], counts["sample requests waiting"]


def assert_close_tensors(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Compare with a tolerance relative to each tensor's maximum."""
    assert one.keys() == other.keys()
    for name, expected in other.items():
        np.testing.assert_allclose(one[name], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def assert_close_arrays(one: Sequence[np.ndarray], other: Sequence[np.ndarray], tolerance: float = 1e-4) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
