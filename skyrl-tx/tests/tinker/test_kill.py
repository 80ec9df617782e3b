"""The engine or the server is killed while it runs a client's requests: after the restart, results are as without
the kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import tinker
from sqlmodel import select
from tinker import types
from tx_kit.engines import VOCABULARY
from tx_kit.processes import SECONDS, ServerProcess, process
from tx_kit.servers import BASE_MODEL, config_for

from tx.tinker.db_models import Kind, Request, RequestStatus
from tx.tinker.store.database import open_database, reading

T = TypeVar("T")
Found = tuple[list[float], list[list[int]]]
N_STEPS = 6
MAX_TRIES = 20
STEP = types.AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints([1, 2, 3])

on_jax = pytest.mark.parametrize("server", ["jax"], indirect=True)
on_both = pytest.mark.parametrize("server", ["jax", pytest.param("torch", marks=pytest.mark.nightly)], indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[ServerProcess]:
    state = tmp_path_factory.mktemp("kill") / "state"
    named = ("--base-model", str(tiny_model), "--served-model-name", BASE_MODEL, f"--backend={request.param}")
    with process(state, *named, '--backend-config={"cache_gib": 0.001}', "--hold-sec=2") as started:
        yield started


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> Found:
    """The results of the loop without a kill."""
    return loop(server, lambda ask: ask())


@pytest.fixture
def training(server: ServerProcess) -> Iterator[tinker.TrainingClient]:
    client = server.sdk()
    yield client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result(timeout=SECONDS)
    client.close(status="success").result()


class Killer:
    """Kills once, when a request of a kind is running."""

    def __init__(self, server: ServerProcess, kind: Kind, kill: Callable[[ServerProcess], None]) -> None:
        self._server = server
        self._kind = kind
        self._kill = kill
        self.has_killed = False

    def __call__(self, ask: Callable[[], T]) -> T:
        """Run a call and kill meanwhile; return its result. Nothing is killed if the engine was too fast."""
        if self.has_killed:
            return ask()
        database = open_database(config_for(self._server.folder).database_url)
        begun = (Request.kind == self._kind, Request.status == RequestStatus.PENDING, Request.n_tries > 0)

        def is_at_work() -> bool:
            with reading(database) as db:
                return db.exec(select(Request.request_id).where(*begun)).first() is not None

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask)
            while not running.done() and not self.has_killed:
                self.has_killed = is_at_work() and strike(self._server, is_at_work, self._kill)
            database.dispose()
            return running.result(SECONDS)


def strike(server: ServerProcess, is_the_moment: Callable[[], bool], kill: Callable[[ServerProcess], None]) -> bool:
    """Pause the engine, and kill unless the moment has passed."""
    engine = server.engine
    engine.suspend()
    if is_the_moment():
        kill(server)
        return True
    engine.resume()
    return False


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


def data(seed: int) -> list[types.Datum]:
    """Return four sequences."""
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


def step(training: tinker.TrainingClient, number: int) -> list[float]:
    """Run two passes and a step, all sent before any result is awaited; return the losses."""
    passes = [training.forward_backward(data(2 * number + i), "cross_entropy") for i in range(2)]
    stepped = training.optim_step(STEP)
    losses = [one.result(timeout=SECONDS).metrics["loss:sum"] for one in passes]
    stepped.result(timeout=SECONDS)
    return losses


def loss(training: tinker.TrainingClient) -> float:
    return training.forward(data(0), "cross_entropy").result(timeout=SECONDS).metrics["loss:sum"]


def draw_samples(sampler: tinker.SamplingClient, n_samples: int, max_tokens: int) -> list[list[int]]:
    params = types.SamplingParams(max_tokens=max_tokens, seed=5, stop=[])
    found = sampler.sample(PROMPT, n_samples, params).result(timeout=SECONDS)
    return [list(one.tokens) for one in found.sequences]


def loop(server: ServerProcess, disturbed: Callable[[Callable[[], list[float]]], list[float]]) -> Found:
    """Run training steps; return their losses, and samples at the end."""
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4, seed=3).result(timeout=SECONDS)
    losses = []
    for number in range(N_STEPS):
        losses += disturbed(lambda number=number: step(training, number))  # type: ignore[misc]
    sampler = training.save_weights_and_get_sampling_client().result(timeout=SECONDS)
    samples = draw_samples(sampler, 2, 8)
    client.close(status="success").result()
    return losses, samples


def assert_undisturbed(server: ServerProcess, killer: Killer, undisturbed: Found) -> None:
    """Run the loop with a kill, again if the engine was always too fast for it."""
    for _ in range(MAX_TRIES):
        assert loop(server, killer) == undisturbed
        if killer.has_killed:
            break
    assert killer.has_killed


@on_both
def test_the_engine_is_killed_while_it_trains(server: ServerProcess, undisturbed: Found) -> None:
    before = server.engine.pid
    killer = Killer(server, Kind.FORWARD_BACKWARD, kill_engine)
    assert_undisturbed(server, killer, undisturbed)
    assert server.engine.pid != before
    assert "the engine has died: signal 9" in server.log


@on_jax
def test_the_server_is_killed_while_its_engine_trains(server: ServerProcess, undisturbed: Found) -> None:
    before = server.engine
    killer = Killer(server, Kind.OPTIM_STEP, kill_server)
    assert_undisturbed(server, killer, undisturbed)
    assert not before.is_running()


@on_jax
def test_the_engine_is_killed_while_it_samples(server: ServerProcess, training: tinker.TrainingClient) -> None:
    step(training, 0)
    sampler = training.save_weights_and_get_sampling_client().result(timeout=SECONDS)
    expected = draw_samples(sampler, 32, 100)
    killer = Killer(server, Kind.SAMPLE, kill_engine)
    for _ in range(MAX_TRIES):
        assert killer(lambda: draw_samples(sampler, 32, 100)) == expected
        if killer.has_killed:
            break
    assert killer.has_killed


@on_jax
def test_the_engine_is_killed_while_it_saves(server: ServerProcess, training: tinker.TrainingClient) -> None:
    step(training, 0)
    killer = Killer(server, Kind.SAVE_WEIGHTS, kill_engine)
    paths = []
    while not killer.has_killed:
        assert len(paths) < MAX_TRIES
        name = str(len(paths))
        paths.append(killer(lambda name=name: training.save_state(name).result(timeout=SECONDS).path))  # type: ignore[misc]
    client = server.sdk()
    saved = client.create_training_client_from_state_with_optimizer(paths[-1]).result(timeout=SECONDS)
    assert [step(saved, 1), loss(saved)] == [step(training, 1), loss(training)]
    client.close(status="success").result()


@on_jax
def test_the_engine_is_killed_while_it_writes_a_restore_point(
    server: ServerProcess, training: tinker.TrainingClient
) -> None:
    folder = server.folder / "restore" / training.model_id.replace(":", "_")

    def is_written() -> bool:
        return any(folder.glob(".unfinished-*"))

    deadline = time.monotonic() + SECONDS
    has_killed = False
    for number in range(MAX_TRIES):
        step(training, number)
        before, points = loss(training), {one.name for one in folder.glob("[0-9]*")}
        while not has_killed and points == {one.name for one in folder.glob("[0-9]*")}:
            assert time.monotonic() < deadline
            has_killed = is_written() and strike(server, is_written, kill_engine)
        if has_killed:
            break
    assert has_killed
    assert [loss(training) for _ in range(2)] == [before, before]
