"""A client's loop while the engine, or the server, is killed and started again: it ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tinker import types
from tx_engine import VOCABULARY
from tx_process import SECONDS, ServerProcess, process
from tx_server import BASE_MODEL

N_STEPS = 6
STEP = types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("kill") / "state"
    named = ("--base-model", str(tiny_model), "--served-model-name", BASE_MODEL)
    with process(state, *named, '--backend-config={"cache_gib": 0.001}', "--hold-sec=2") as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> tuple[list[float], list[list[int]]]:
    """What comes of the loop when nobody is killed."""
    return loop(server, lambda step: None)


def data(seed: int) -> list[types.Datum]:
    """Four sequences."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCABULARY, (4, 21))
    weights = random.normal(size=20).astype(np.float32)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:], "weights": weights},
        )
        for row in tokens
    ]


def loop(server: ServerProcess, disturb: Callable[[int], None]) -> tuple[list[float], list[list[int]]]:
    """Losses of each step, and samples in the end. What is asked for is not waited for before `disturb`."""
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    losses = []
    for step in range(N_STEPS):
        passes = [training.forward_backward(data(2 * step + i), "cross_entropy") for i in range(2)]
        stepped = training.optim_step(STEP)
        disturb(step)
        losses += [one.result(timeout=SECONDS).metrics["loss:sum"] for one in passes]
        stepped.result(timeout=SECONDS)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=SECONDS)
    params = types.SamplingParams(max_tokens=8, seed=5)
    found = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 2, params).result(timeout=SECONDS)
    client.close(status="success")
    return losses, [list(one.tokens) for one in found.sequences]


def test_the_engine_is_killed(server: ServerProcess, undisturbed: tuple[list[float], list[list[int]]]) -> None:
    killed = []

    def disturb(step: int) -> None:
        if step == 3:
            killed.append(server.engine.pid)
            os.kill(killed[0], signal.SIGKILL)

    assert loop(server, disturb) == undisturbed
    assert server.engine.pid not in killed
    assert "the engine has died: signal 9" in server.log


def test_the_server_is_killed(server: ServerProcess, undisturbed: tuple[list[float], list[list[int]]]) -> None:
    engines: list[psutil.Process] = []
    start = threading.Timer(0.5, server.start)

    def disturb(step: int) -> None:
        if step == 3:
            engines.append(server.engine)
            server.kill()
            start.start()

    assert loop(server, disturb) == undisturbed
    start.join()
    assert not engines[0].is_running()


def test_a_step_is_done_once(server: ServerProcess) -> None:
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result()
    training.forward_backward(data(0), "cross_entropy").result(timeout=SECONDS)
    training.optim_step(STEP).result(timeout=SECONDS)
    before = training.forward(data(0), "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"]
    os.kill(server.engine.pid, signal.SIGKILL)
    after = [training.forward(data(0), "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"] for _ in range(2)]
    assert after == [before, before]
    client.close(status="success")
