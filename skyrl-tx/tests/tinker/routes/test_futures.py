"""Promises over HTTP: repetitions, polls, and the replies to older clients."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import tinker
from tinker import types
from tx_kit.servers import (
    BASE_MODEL,
    SAMPLE,
    Running,
    assert_refused,
    config_for,
    new_model,
    new_sampler,
    new_session,
    result_of,
    serving,
    wait_until,
)

from tx.tinker.db_models import Kind, Model, ModelStatus, TxRequest
from tx.tinker.doorbell import UNUSABLE
from tx.tinker.server.supervisor import Supervisor
from tx.tinker.wire import codec

PROTOBUF = {"Content-Type": "application/x-protobuf"}
TENSOR = {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
DATUM = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
PASS = {"data": [DATUM], "loss_fn": "cross_entropy"}
STEP = {"adam_params": {"learning_rate": 0.1}}


SERVER_SETTINGS = {"hold_sec": 0.5, "max_body_bytes": 100_000}


@pytest.fixture(autouse=True)
def _working_engine(server: Running) -> Iterator[None]:
    yield
    server.is_engine_paused, server.fails_with = False, None


@pytest.fixture
def session_id(http: httpx.Client) -> str:
    return new_session(http)


@pytest.fixture
def model_id(http: httpx.Client, session_id: str) -> str:
    created = new_model(http, session_id)
    assert new_model(http, session_id).json() == created.json()
    return str(result_of(http, created)["model_id"])


def step(http: httpx.Client, model_id: str, **fields: Any) -> httpx.Response:
    return http.post("optim_step", json={"model_id": model_id, **STEP, **fields})


def send_pass(http: httpx.Client, model_id: str, seq_id: int) -> httpx.Response:
    content = codec.message_from_json(model_id, seq_id, PASS, is_forward_only=False).SerializeToString()
    return http.post("forward_backward", content=content, headers=PROTOBUF)


def n_requests(server: Running, kind: Kind, model_id: str) -> int:
    return sum(one.model_id == model_id for one in server.rows(kind))


@pytest.mark.parametrize(("seq_ids", "n"), [((1, 2), 1), ((0, None), 2)], ids=["numbered", "without a number"])
def test_a_repeated_request_is_the_same_if_it_has_a_number(
    http: httpx.Client, server: Running, model_id: str, seq_ids: tuple[int, int | None], n: int
) -> None:
    passes = [send_pass(http, model_id, seq_ids[0]).json()["request_id"] for _ in range(2)]
    steps = [step(http, model_id, seq_id=seq_ids[1]).json()["request_id"] for _ in range(2)]
    assert (len(set(passes)), len(set(steps))) == (n, n)
    assert n_requests(server, Kind.OPTIM_STEP, model_id) == n_requests(server, Kind.FORWARD_BACKWARD, model_id) == n
    save = {"model_id": model_id, "path": "x", "seq_id": 9}
    assert http.post("save_weights", json=save).status_code == 200
    for path, body in (("save_weights", {**save, "path": "y"}), ("save_weights_for_sampler", save)):
        words = f"seq_id=9 of {model_id} was used by another request, save_weights"
        assert_refused(http.post(path, json=body), words)


def test_a_repeated_sample(http: httpx.Client, server: Running, session_id: str) -> None:
    ids = [new_sampler(http, session_id) for _ in range(2)]
    assert ids[0] == ids[1]
    sample = {**SAMPLE, "base_model": None, "num_samples": 2, "sampling_session_id": ids[0], "seq_id": 7}
    promises = [http.post("asample", json=sample) for _ in range(2)]
    assert promises[0].json() == promises[1].json()
    assert len(promises[0].json()["sample_sequence_ids"]) == 2
    assert sum(one.sampling_session_id == ids[0] for one in server.rows(Kind.SAMPLE)) == 1
    assert http.post("asample", json={**sample, "num_samples": 3}).status_code == 400


# -- older clients write and read JSON


def test_passes_in_json(http: httpx.Client, server: Running, model_id: str) -> None:
    passed = http.post("forward_backward", json={"model_id": model_id, "seq_id": 1, "forward_backward_input": PASS})
    content = result_of(http, passed, Accept="application/json")
    assert content["metrics"] == {"loss:sum": 6.0}
    assert content["loss_fn_outputs"][0]["logprobs"] == {"data": [-1.0, -2.0, -3.0], "dtype": "float32", "shape": [3]}
    body = {"model_id": model_id, "seq_id": 2, "forward_input": PASS}
    assert result_of(http, http.post("forward", json=body))["loss_fn_outputs"]
    assert codec.message_from_bytes(server.rows(Kind.FORWARD_BACKWARD)[-1].payload).forward_only


def test_clients_wait_for_results(http: httpx.Client, server: Running, model_id: str) -> None:
    """A poll is held for a while; any number of clients may wait for the same result."""
    server.is_engine_paused = True
    accepted = step(http, model_id)
    started = time.monotonic()
    content = result_of(http, accepted)
    assert 0.4 < time.monotonic() - started < 20
    assert (content["type"], content["queue_state"]) == ("try_again", "active")
    assert content["request_id"] == accepted.json()["request_id"]
    threading.Timer(0.2, lambda: setattr(server, "is_engine_paused", False)).start()
    with ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda _: result_of(http, accepted), range(10)))
    assert all(one == {"metrics": {"skyrl.ai/grad_norm": 1.0}} for one in found)
    assert result_of(http, accepted) == found[0]
    assert server.service.promises.n_waiting == 0


def test_unknown_and_forgotten_requests(http: httpx.Client, server: Running, model_id: str) -> None:
    for name in ("999", "abc", "-1", "1" * 40, "\u0663"):
        assert http.post("retrieve_future", json={"request_id": name}).status_code == 404
    accepted = step(http, model_id)
    assert result_of(http, accepted)["metrics"]
    request_id = accepted.json()["request_id"]
    server.set(TxRequest, int(request_id), result=None)
    assert http.post("retrieve_future", json={"request_id": request_id}).status_code == 410


# -- an engine that does not work


def supervisor_of(folder: Path, program: str, *, pause_sec: float = 0.1) -> Supervisor:
    command = (sys.executable, "-c", program)
    return Supervisor(config_for(folder), lambda: None, command=command, first_pause_sec=pause_sec)


def test_a_restarting_engine(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, "import time; time.sleep(600)", pause_sec=60)
    with serving(tmp_path, engine=False, supervisor=supervisor, hold_sec=0.05) as running, running.client() as http:
        accepted = http.post("asample", json=SAMPLE)
        wait_until(lambda: supervisor.is_running)
        assert "queue_state_reason" not in result_of(http, accepted)
        (engine,) = (one for one in psutil.Process().children() if "--doorbell-fd" in one.cmdline())
        engine.kill()
        wait_until(lambda: not supervisor.is_running)
        content = result_of(http, accepted)
    assert (content["type"], content["queue_state"]) == ("try_again", "paused_capacity")
    assert content["queue_state_reason"] == "the engine died and is restarting; nothing is lost"


def test_an_engine_that_is_given_up(tmp_path: Path) -> None:
    """Waiting clients are notified at once."""
    supervisor = supervisor_of(tmp_path, "raise SystemExit('no such model')")
    with serving(tmp_path, engine=False, supervisor=supervisor, hold_sec=40) as running:
        client = running.sdk()
        sampler = client.create_sampling_client(base_model=BASE_MODEL).result()
        params = types.SamplingParams(max_tokens=1)
        with pytest.raises(tinker.RequestFailedError, match=r"died 5 times .* no such model") as raised:
            sampler.sample(types.ModelInput.from_ints([1]), 1, params).result(timeout=30)
        assert raised.value.category == "server"
        client.close(status="success").result()


def test_an_unusable_engine(tmp_path: Path) -> None:
    """Waiting clients get no failure: the server exits, and can be restarted with correct flags."""
    supervisor = supervisor_of(tmp_path, f"raise SystemExit({UNUSABLE})")
    with serving(tmp_path, engine=False, supervisor=supervisor, hold_sec=40) as running, running.client() as http:
        accepted = http.post("asample", json=SAMPLE)
        wait_until(lambda: supervisor.unusable is not None)
        assert result_of(http, accepted)["type"] == "try_again"


# -- models that cannot go on


@pytest.mark.parametrize(
    ("fields", "reason", "refusal"),
    [
        (
            {"base_model": "org/other"},
            f"it waits until org/other is served again; this server has {BASE_MODEL}",
            "needs the base model org/other",
        ),
        (
            {"lost_because": "MemoryError: no room"},
            "model {} could not be restored, so it waits for the next start: MemoryError: no room",
            "model {} could not be restored",
        ),
    ],
)
def test_requests_of_a_model_that_waits_for_another_engine(
    http: httpx.Client, server: Running, model_id: str, fields: dict[str, str], reason: str, refusal: str
) -> None:
    server.is_engine_paused = True
    waiting = step(http, model_id)
    server.set(Model, model_id, **fields)
    content = result_of(http, waiting)
    assert (content["type"], content["queue_state"]) == ("try_again", "paused_capacity")
    assert content["queue_state_reason"] == reason.format(model_id)
    assert_refused(step(http, model_id), refusal.format(model_id))
    unloaded = http.post("unload_model", json={"model_id": model_id})
    assert unloaded.status_code == (400 if "base_model" in fields else 200)


def test_failed_models(http: httpx.Client, server: Running, session_id: str) -> None:
    server.fails_with = ("no memory left", "server")
    assert result_of(http, new_model(http, session_id))["error"] == "no memory left"
    server.set(Model, f"{session_id}:train:0", status=ModelStatus.FAILED)
    assert_refused(step(http, f"{session_id}:train:0"), "could not be created: no memory left")


def test_unloaded_models(http: httpx.Client, model_id: str) -> None:
    first, second = (http.post("unload_model", json={"model_id": model_id}) for _ in range(2))
    assert result_of(http, first) == {"model_id": model_id, "type": "unload_model"}
    third = http.post("unload_model", json={"model_id": model_id})
    assert first.json() == second.json() == third.json()
    assert_refused(step(http, model_id), "was unloaded")


def test_cancelling(http: httpx.Client, server: Running, model_id: str) -> None:
    done = http.post("asample", json=SAMPLE)
    for _ in range(2):
        assert result_of(http, done)["sequences"]
        assert http.post("cancel_future", json={"request_id": done.json()["request_id"]}).status_code == 200
    server.is_engine_paused = True
    sample = http.post("asample", json=SAMPLE)
    assert http.post("cancel_future", json={"request_id": sample.json()["request_id"]}).status_code == 200
    assert result_of(http, sample) == {"error": "the request was cancelled", "category": "user"}
    request_id = step(http, model_id).json()["request_id"]
    assert_refused(http.post("cancel_future", json={"request_id": request_id}), "is not a sample")


def test_too_many_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, engine=False, max_queued_requests=5) as running, running.client() as http:
        assert [http.post("asample", json=SAMPLE).status_code for _ in range(7)] == [200] * 5 + [429] * 2
        assert new_model(http, new_session(http)).status_code == 200  # a separate queue
        refused = http.post("asample", json=SAMPLE)
    assert_refused(refused, "5 requests of the base model are pending", status=429)
    assert float(refused.headers["retry-after-ms"]) == 1000


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no zstd", {"Content-Encoding": "zstd"}, 400),
        (bytes(200_000), {}, 413),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"\xff\xff\xff", {}, 422),
        (b"[" * 90_000, {"Content-Type": "application/json"}, 422),
    ],
)
def test_invalid_bodies(http: httpx.Client, body: bytes, headers: dict[str, str], status: int) -> None:
    refused = http.post("forward_backward", content=body, headers={**PROTOBUF, **headers})
    assert refused.status_code == status
    assert refused.json()["detail"]


def test_sessions_end_once(http: httpx.Client, session_id: str) -> None:
    assert http.post("session_heartbeat", json={"session_id": session_id}).json() == {}
    for reason in ("errored", "success"):
        finished = http.post(f"sessions/{session_id}/finish", json={"reason": {"type": reason}, "detail": "x"})
        assert finished.status_code == 200
    (found,) = http.post("sessions/search", json={"session_id": session_id}).json()["sessions"]
    assert found["status"] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "x"}
    refused = http.post("session_heartbeat", json={"session_id": session_id})
    assert refused.status_code == 410
    assert refused.json()["detail"] == f"session {session_id} is finished; create a new one"
