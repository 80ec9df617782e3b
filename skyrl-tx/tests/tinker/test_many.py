"""Many concurrent clients with a real server and engine: none waits forever, and results do not depend on the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tinker import types
from tx_kit.engines import VOCABULARY, serving_with_engine
from tx_kit.servers import BASE_MODEL, Running

SECONDS = 120
N_ADAPTERS = 8


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Running]:
    with serving_with_engine(tmp_path_factory.mktemp("many") / "state", tiny_model) as served:
        yield served


def prompt(number: int) -> types.ModelInput:
    random = np.random.default_rng(number)
    return types.ModelInput.from_ints(random.integers(0, VOCABULARY, 1 + number % 30).tolist())


def test_two_hundred_samples_at_once(running: Running) -> None:
    client = running.sdk()
    sampler = client.create_sampling_client(base_model=BASE_MODEL).result()

    def ask(number: int) -> list[list[int]]:
        params = types.SamplingParams(max_tokens=1 + number % 9, seed=number, stop=[])
        found = sampler.sample(prompt(number), 1 + number % 2, params).result(timeout=SECONDS)
        return [list(one.tokens) for one in found.sequences]

    with ThreadPoolExecutor(200) as pool:
        together = list(pool.map(ask, range(200)))
    assert [len(one) for one in together] == [1 + number % 2 for number in range(200)]
    assert all(len(tokens) == 1 + number % 9 for number, one in enumerate(together) for tokens in one)
    assert [ask(number) for number in range(0, 200, 40)] == together[::40]
    client.close(status="success")


def datum(seed: int) -> types.Datum:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, 12 + seed % 15)
    weights = random.normal(size=len(tokens) - 1).astype(np.float32)
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def live(running: Running, number: int) -> tuple[list[float], list[tuple[list[int], list[float]]]]:
    """Run a client: train a few steps and sample after each; return losses and samples."""
    client = running.sdk()
    rank = (2, 4, 8)[number % 3]
    training = client.create_lora_training_client(BASE_MODEL, rank=rank, seed=number).result(timeout=SECONDS)
    losses, samples = [], []
    for step in range(2):
        data = [datum(100 * number + 10 * step + i) for i in range(1 + number % 4)]
        passed = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.02)).result(timeout=SECONDS)
        losses.append(passed.result(timeout=SECONDS).metrics["loss:sum"])
        sampler = training.save_weights_and_get_sampling_client().result(timeout=SECONDS)
        params = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        found = sampler.sample(prompt(number), 2, params).result(timeout=SECONDS)
        samples += [(list(one.tokens), list(one.logprobs or ())) for one in found.sequences]
    client.close(status="success")
    return losses, samples


@pytest.mark.nightly
def test_eight_adapters_at_once(running: Running) -> None:
    """Results are bitwise the same as for each client alone."""
    with ThreadPoolExecutor(N_ADAPTERS) as pool:
        together = list(pool.map(lambda number: live(running, number), range(N_ADAPTERS)))
    alone = [live(running, number) for number in range(N_ADAPTERS)]
    assert together == alone
    assert len({tuple(losses) for losses, _ in alone}) == N_ADAPTERS
