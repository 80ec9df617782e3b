"""Unused models, files and engine time are released."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from tx_kit.engines import engine_for, load_backend, serving_with_engine
from tx_kit.servers import (
    BASE_MODEL,
    SAMPLE,
    Running,
    assert_refused,
    new_model,
    new_sampler,
    new_session,
    result_of,
    serving,
    wait_until,
)

from tx.tinker.db_models import Kind, Model, RequestStatus
from tx.tinker.server.cleaner import Cleaner


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, minimal_model: Path) -> Iterator[Running]:
    folder, settings = tmp_path_factory.mktemp("lifecycle"), {"max_models": 1, "session_cleanup_interval_sec": 0.1}
    with serving_with_engine(folder / "state", load_backend(minimal_model), **settings) as served:
        yield served


@pytest.fixture
def http(http: httpx.Client) -> Iterator[httpx.Client]:
    """Finishes all sessions at the end, to make room."""
    yield http
    for session_id in http.get("sessions").json()["sessions"]:
        finish(http, session_id)


def new_model_when_there_is_room(http: httpx.Client, session_id: str) -> None:
    wait_until(lambda: new_model(http, session_id).status_code == 200)


def finish(http: httpx.Client, session_id: str) -> None:
    response = http.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    assert response.status_code == 200


def unload(http: httpx.Client, session_id: str) -> None:
    assert http.post("unload_model", json={"model_id": f"{session_id}:train:0"}).status_code == 200


@pytest.mark.parametrize("end", [finish, unload])
def test_finishing_a_session_frees_its_models(
    server: Running, http: httpx.Client, end: Callable[[httpx.Client, str], None]
) -> None:
    first, second = new_session(http), new_session(http)
    new_model_when_there_is_room(http, first)
    words = "1 models under training, which is the server's limit, --max-models; unload one, end its session"
    assert_refused(new_model(http, second), words)
    end(http, first)
    assert result_of(http, new_model(http, second))["model_id"] == f"{second}:train:0"
    assert [one.model_id for one in server.rows(Kind.UNLOAD_MODEL)].count(f"{first}:train:0") == 1


def test_deleting_a_checkpoint_deletes_its_files(server: Running, http: httpx.Client) -> None:
    session_id = new_session(http)
    new_model_when_there_is_room(http, session_id)
    model_id = f"{session_id}:train:0"
    saved = http.post("save_weights", json={"model_id": model_id, "path": "x"})
    assert result_of(http, saved)["path"] == f"tinker://{model_id}/weights/x"
    folder = server.config.checkpoints_base / f"{session_id}_train_0" / "weights" / "x"
    assert any(folder.iterdir())
    assert http.delete(f"training_runs/{model_id}/checkpoints/weights/x").is_success
    assert not folder.exists()
    assert not [path for path in folder.parent.rglob("*") if path.is_file()]


def test_an_ended_session_accepts_no_requests(http: httpx.Client) -> None:
    session_id = new_session(http)
    model_id = f"{session_id}:train:0"
    new_model_when_there_is_room(http, session_id)
    sampler_id = new_sampler(http, session_id)
    finish(http, session_id)
    new = {"session_id": session_id, "base_model": BASE_MODEL}
    late = {
        "create_model": {**new, "model_seq_id": 1},
        "optim_step": {"model_id": model_id, "adam_params": {}},
        "save_weights": {"model_id": model_id, "path": "x"},
        "create_sampling_session": {**new, "sampling_session_seq_id": 1},
        "asample": {**SAMPLE, "base_model": None, "sampling_session_id": sampler_id, "seq_id": 1},
    }
    for path, body in late.items():
        assert_refused(http.post(path, json=body), f"session {session_id} is finished; create a new one")


def test_pending_saves_of_an_ended_session_run(tmp_path: Path, minimal_model: Path) -> None:
    with serving(tmp_path / "state", engine=False) as running, running.client() as http:
        session_id = new_session(http)
        model_id = f"{session_id}:train:0"
        new_model(http, session_id)
        steps = [http.post("optim_step", json={"model_id": model_id, "adam_params": {}}) for _ in range(2)]
        saved = http.post("save_weights", json={"model_id": model_id, "path": "last"})
        snapshot = {"model_id": model_id, "sampling_session_seq_id": 5}
        unwanted = [http.post("save_weights_for_sampler", json=snapshot)]
        unwanted.append(http.post("optim_step", json={"model_id": model_id, "adam_params": {}}))
        sampled = {**SAMPLE, "base_model": None, "sampling_session_id": new_sampler(http, session_id)}
        unwanted.append(http.post("asample", json=sampled))
        finish(http, session_id)
        for one in unwanted:
            assert result_of(http, one) == {"error": "the request was cancelled", "category": "user"}
        with engine_for(running, load_backend(minimal_model)):
            assert result_of(http, saved)["path"] == f"tinker://{model_id}/weights/last"
            assert all("metrics" in result_of(http, one) for one in steps)
            wait_until(lambda: running.get(Model, model_id).status == "unloaded")
        assert (running.config.checkpoints_base / f"{session_id}_train_0" / "weights" / "last").is_dir()
        assert running.rows(Kind.SAMPLE)[0].status is RequestStatus.CANCELLED


def test_unwanted_samples_are_cancelled(http: httpx.Client) -> None:
    """Samples end when a client cancels them or disappears."""
    session_id = new_session(http)
    params = {"max_tokens": 120, "seed": 1, "stop": []}
    long = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": params, "num_samples": 4096}
    give_up = http.post("asample", json={**long, "base_model": BASE_MODEL})
    gone = http.post("asample", json={**long, "sampling_session_id": new_sampler(http, session_id)})
    http.post("cancel_future", json={"request_id": give_up.json()["request_id"]})
    finish(http, session_id)
    started = time.monotonic()
    assert result_of(http, http.post("asample", json=SAMPLE))["sequences"]
    assert time.monotonic() - started < 20
    for one in (give_up, gone):
        assert result_of(http, one)["error"] == "the request was cancelled"


def test_addresses_survive_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as running:
        client = running.sdk()
        training = client.create_lora_training_client(BASE_MODEL, rank=4).result()
        path = training.save_weights_external("out").result().path
        urls = running.rest().get_external_weights_urls(path).result().urls
        client.close(status="success")
    with serving(tmp_path / "state") as running:
        found = httpx.get(running.url + urlsplit(urls["adapter_config.json"]).path)
        assert (found.status_code, found.text) == (200, '{"r": 4}')


async def test_a_session_that_ends_during_the_creation_of_its_model(tmp_path: Path, minimal_model: Path) -> None:
    with serving(tmp_path / "state", engine=False, session_timeout_sec=0) as running, running.client() as http:
        session_id = new_session(http)
        new_model(http, session_id)
        cleaner = Cleaner(running.service)
        for _ in range(2):
            await cleaner.clean()
        with engine_for(running, load_backend(minimal_model)) as engine:
            wait_until(lambda: running.get(Model, f"{session_id}:train:0").status == "unloaded")
            assert dict(engine._backend.models()) == {}
