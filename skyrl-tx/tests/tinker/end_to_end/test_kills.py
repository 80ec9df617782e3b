"""The engine or the server is killed while it runs requests; after the restart, results are as without a kill."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import tinker
from sqlmodel import select
from tinker import types
from tx_kit.engines import SETTINGS
from tx_kit.models import MINIMAL_VOCABULARY
from tx_kit.processes import SECONDS, ServerProcess, process
from tx_kit.servers import BASE_MODEL, config_for

from tx.tinker.db_models import Kind, RequestStatus, TxRequest
from tx.tinker.store.database import open_database, reading

T = TypeVar("T")
Kill = Callable[[ServerProcess], None]
N_STEPS = 6
MAX_TRIES = 20
STEP = types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)

on_jax = pytest.mark.parametrize("server", ["jax"], indirect=True)
on_both = pytest.mark.parametrize("server", ["jax", pytest.param("torch", marks=pytest.mark.nightly)], indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minimal_model: Path
) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("kill") / "state"
    named = ("--base-model", str(minimal_model), "--served-model-name", BASE_MODEL, f"--backend={request.param}")
    with process(state, *named, f"--backend-config={json.dumps(SETTINGS)}", "--hold-sec=2") as started:
        yield started


@pytest.fixture
def training(server: ServerProcess) -> Iterator[tinker.TrainingClient]:
    client = server.sdk()
    yield client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result(timeout=SECONDS)
    client.close(status="success").result()


def kill_engine(server: ServerProcess) -> None:
    engine = server.engine
    engine.kill()
    engine.wait(SECONDS)


def kill_server(server: ServerProcess) -> None:
    """Kill and restart the server; its engine exits by itself."""
    engine = server.engine
    server.child.kill()
    server.child.wait()
    engine.resume()
    engine.wait(SECONDS)
    server.start()


def strike(server: ServerProcess, is_the_moment: Callable[[], bool], kill: Kill) -> bool:
    """Pause the engine, and kill unless the moment has passed."""
    engine = server.engine
    engine.suspend()
    if is_the_moment():
        kill(server)
        return True
    engine.resume()
    return False


def kill_during(server: ServerProcess, kind: Kind, kill: Kill, call: Callable[[], T]) -> tuple[T, bool]:
    """Run a call, and kill while a request of a kind is running; return its result, and False if it was too fast."""
    database = open_database(config_for(server.folder).database_url)
    begun = (TxRequest.kind == kind, TxRequest.status == RequestStatus.PENDING, TxRequest.n_tries > 0)

    def is_running() -> bool:
        with reading(database) as db:
            return db.exec(select(TxRequest.request_id).where(*begun)).first() is not None

    has_killed = False
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(call)
        while not called.done() and not has_killed:
            has_killed = is_running() and strike(server, is_running, kill)
        database.dispose()
        return called.result(SECONDS), has_killed


def results_until_kill(server: ServerProcess, kind: Kind, kill: Kill, call: Callable[[], T]) -> Iterator[T]:
    """Repeat a call until something was killed during it."""
    for _ in range(MAX_TRIES):
        result, has_killed = kill_during(server, kind, kill, call)
        yield result
        if has_killed:
            return
    raise AssertionError("the engine was always too fast")


def data(seed: int) -> list[types.Datum]:
    random = np.random.default_rng(seed)
    tokens, weights = random.integers(0, MINIMAL_VOCABULARY, (4, 21)), random.normal(size=20).astype(np.float32)
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:], "weights": weights},
        )
        for row in tokens
    ]


def step(training: tinker.TrainingClient, number: int = 0) -> list[float]:
    """Run two passes and a step, all sent before any result is awaited; return the losses."""
    passes = [training.forward_backward(data(2 * number + i), "cross_entropy") for i in range(2)]
    stepped = training.optim_step(STEP)
    losses = [one.result(timeout=SECONDS).metrics["loss:sum"] for one in passes]
    stepped.result(timeout=SECONDS)
    return losses


def draw_samples(sampler: tinker.SamplingClient, n_samples: int, max_tokens: int) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=max_tokens, seed=5, stop=[])
    found = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), n_samples, params).result(timeout=SECONDS)
    return [list(one.tokens) for one in found.sequences]


def train_and_sample(server: ServerProcess) -> tuple[list[list[float]], list[list[int]]]:
    """Run training steps of a new client; return their losses, and samples at the end."""
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result(timeout=SECONDS)
    losses = [step(training, number) for number in range(N_STEPS)]
    samples = draw_samples(training.save_weights_and_get_sampling_client().result(timeout=SECONDS), 2, 8)
    client.close(status="success").result()
    return losses, samples


@on_both
def test_the_engine_is_killed_while_it_trains(server: ServerProcess) -> None:
    expected, before = train_and_sample(server), server.engine.pid
    for found in results_until_kill(server, Kind.FORWARD_BACKWARD, kill_engine, lambda: train_and_sample(server)):
        assert found == expected
    assert server.engine.pid != before
    assert "the engine has died: signal 9" in server.log


@on_jax
def test_the_server_is_killed_while_its_engine_trains(server: ServerProcess) -> None:
    expected, before = train_and_sample(server), server.engine
    for found in results_until_kill(server, Kind.OPTIM_STEP, kill_server, lambda: train_and_sample(server)):
        assert found == expected
    assert not before.is_running()


@on_jax
def test_the_engine_is_killed_while_it_samples(server: ServerProcess, training: tinker.TrainingClient) -> None:
    step(training)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=SECONDS)
    expected = draw_samples(sampler, 32, 100)
    for found in results_until_kill(server, Kind.SAMPLE, kill_engine, lambda: draw_samples(sampler, 32, 100)):
        assert found == expected
