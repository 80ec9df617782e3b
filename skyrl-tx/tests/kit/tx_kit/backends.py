"""Run passes and samples on a backend, with small data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend, Weights
from tx.tinker.types import (
    AdamParams,
    Datum,
    Pass,
    PassResult,
    SampleRequest,
    SampleResult,
    SamplingParams,
)
from tx_kit.models import VOCABULARY

LORA = LoraConfig(rank=8, seed=3)
WHOLE = LoraConfig(rank=0)
STEP = AdamParams(learning_rate=1e-2)
LENGTHS = (5, 40, 31, 64, 32, 33, 7, 20, 12, 48, 28, 3, 17)
"""On JAX, they form micro-batches of 16 rows with 9 data, 4 rows with 3, and 1 row. Tests keep to these shapes,
since each takes seconds to compile.
"""
MIDDLE = (40, 33, 48)
"""The lengths in the micro-batch of 4 rows."""
Load = Callable[[Path], Backend]
"""Loads a backend with the model in a folder."""


def datum(length: int, seed: int = 0, weight: float = 1.0) -> Datum:
    """Return a random sequence with random targets."""
    rng = np.random.default_rng(seed * 1000 + length)
    tokens, targets = rng.integers(0, VOCABULARY, (2, length)).astype(np.int32)
    return Datum(tokens, {"target_tokens": targets, "weights": np.full(length, weight, np.float32)})


def some_data(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Datum]:
    """Return data whose lengths need several shapes."""
    return [datum(length, seed) for length in lengths]


def next_tokens(tokens: np.ndarray) -> Datum:
    """Return a datum in which each token predicts the next."""
    return Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)})


def run(backend: Backend, *passes: Pass) -> list[PassResult]:
    """Run interleaved passes; return their results."""
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


def learn(backend: Backend, model_id: str, data: Sequence[Datum], params: AdamParams = STEP) -> float:
    """Run a training step; return the loss before it."""
    (result,) = run(backend, Pass(model_id, data, "cross_entropy"))
    backend.optim_step(model_id, params)
    return result.loss


def losses(backend: Backend, model_id: str, data: Sequence[Datum]) -> list[np.ndarray]:
    """Return the current log-probs of the targets."""
    (result,) = run(backend, Pass(model_id, data, "cross_entropy", is_forward_only=True))
    return list(result.logprobs)


def sample(backend: Backend, *requests: tuple[SampleRequest, Weights]) -> list[SampleResult]:
    """Run concurrent requests; return their results."""
    found: dict[int, SampleResult | Exception] = {}

    def note(number: int) -> Callable[[SampleResult | Exception], None]:
        return lambda result: found.__setitem__(number, result)

    for number, (request, weights) in enumerate(requests):
        backend.sample(request, weights, note(number))
    while backend.step():
        pass
    results = []
    for number in range(len(requests)):
        result = found[number]
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def request(prompt: Sequence[int] = (5, 6, 7), *, n: int = 1, max_tokens: int = 8, **params: object) -> SampleRequest:
    """Return a request with a seed."""
    return SampleRequest(prompt, SamplingParams(max_tokens=max_tokens, **({"seed": 1} | params)), n)  # type: ignore[arg-type]


def prompt_logprobs(backend: Backend, prompt: np.ndarray, weights: Weights) -> np.ndarray:
    """Return the log-probs of all tokens but the first."""
    ask = SampleRequest(prompt.tolist(), SamplingParams(max_tokens=1, seed=0), wants_prompt_logprobs=True)
    (found,) = sample(backend, (ask, weights))
    assert found.prompt_logprobs is not None
    assert np.isnan(found.prompt_logprobs[0])
    return found.prompt_logprobs[1:]


def running_and_waiting(backend: Backend) -> tuple[int, int]:
    """Return the numbers of running samples and of waiting requests."""
    counts = backend.counts()
    return counts["samples running"], counts["sample requests waiting"]


def tensors_of(backend: Backend, model_id: str, folder: Path) -> dict[str, np.ndarray]:
    """Save weights and moments to a new folder, and load them."""
    folder.mkdir()
    backend.save_model(model_id, folder)
    return {
        f"{file.name} {name}": one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()
    }


def assert_close_tensors(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Compare with a tolerance relative to each tensor's maximum."""
    assert one.keys() == other.keys()
    for name, expected in other.items():
        np.testing.assert_allclose(one[name], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


def assert_same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    """Compare bitwise."""
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
