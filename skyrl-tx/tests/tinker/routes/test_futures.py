"""Promises over HTTP: repetitions, polls, and the replies to older clients."""

from __future__ import annotations

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
    Running,
    config_for,
    new_model,
    new_sampler,
    new_session,
    result_of,
    serving,
    until,
)

from tx.tinker.db_models import Kind, Model, Request
from tx.tinker.doorbell import UNUSABLE
from tx.tinker.server.supervisor import Supervisor
from tx.tinker.wire import codec
from tx.tinker.wire import tinker_pb2 as pb

PROTOBUF = {"Content-Type": "application/x-protobuf"}
TENSOR = {"data": [1, 2, 3], "dtype": "int64", "shape": [3]}
DATUM = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": {"target_tokens": TENSOR}}
STEP = {"adam_params": {"learning_rate": 0.1}}
SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "state", hold_sec=0.5, max_queued_requests=5, max_body_bytes=100_000) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def session_id(http: httpx.Client) -> str:
    return new_session(http)


@pytest.fixture
def model_id(http: httpx.Client, session_id: str) -> str:
    created = new_model(http, session_id)
    assert new_model(http, session_id).json() == created.json()
    return str(result_of(http, created)["model_id"])


def packed(model_id: str, seq_id: int = 1, **fields: Any) -> bytes:
    data = {"data": [DATUM], "loss_fn": "cross_entropy"}
    message = codec.message_from_json(model_id, seq_id, data, is_forward_only=False)
    message.MergeFrom(pb.ForwardBackwardRequest(**fields))
    return message.SerializeToString()


def test_a_repeated_request_is_the_same_request(http: httpx.Client, server: Running, model_id: str) -> None:
    body = {"model_id": model_id, "seq_id": 1, **STEP}
    first, second = (http.post("optim_step", json=body).json()["request_id"] for _ in range(2))
    assert first == second
    passes = [http.post("forward_backward", content=packed(model_id, 2), headers=PROTOBUF) for _ in range(2)]
    assert passes[0].json() == passes[1].json()
    assert len(server.rows(Kind.OPTIM_STEP)) == len(server.rows(Kind.FORWARD_BACKWARD)) == 1


@pytest.mark.parametrize(
    ("endpoint", "other"),
    [("optim_step", {"adam_params": {"learning_rate": 0.2}}), ("save_weights", {"path": "x"})],
)
def test_a_different_request_with_the_same_number(http: httpx.Client, model_id: str, endpoint: str, other: Any) -> None:
    http.post("optim_step", json={"model_id": model_id, "seq_id": 1, **STEP})
    refused = http.post(endpoint, json={"model_id": model_id, "seq_id": 1, **other})
    assert refused.status_code == 400
    assert f"seq_id=1 of {model_id} was used by another request, optim_step" in refused.json()["detail"]


def test_a_different_model_with_the_same_number(http: httpx.Client, session_id: str, model_id: str) -> None:
    assert new_model(http, session_id, rank=8).status_code == 400


def test_a_repeated_sample(http: httpx.Client, server: Running, session_id: str) -> None:
    ids = [new_sampler(http, session_id) for _ in range(2)]
    assert ids[0] == ids[1]
    sample = {**SAMPLE, "base_model": None, "num_samples": 2}
    promises = [http.post("asample", json={**sample, "sampling_session_id": ids[0], "seq_id": 7}) for _ in range(2)]
    assert promises[0].json() == promises[1].json()
    assert len(promises[0].json()["sample_sequence_ids"]) == 2
    assert len(server.rows(Kind.SAMPLE)) == 1
    other = {**sample, "num_samples": 3, "sampling_session_id": ids[0], "seq_id": 7}
    assert http.post("asample", json=other).status_code == 400


def test_requests_without_numbers_are_distinct(http: httpx.Client, server: Running, model_id: str) -> None:
    for _ in range(2):
        http.post("forward_backward", content=packed(model_id, 0), headers=PROTOBUF)
        http.post("optim_step", json={"model_id": model_id, **STEP})
    assert len(server.rows(Kind.OPTIM_STEP)) == len(server.rows(Kind.FORWARD_BACKWARD)) == 2


def test_older_clients_write_and_read_json(http: httpx.Client, model_id: str) -> None:
    body = {"model_id": model_id, "seq_id": 1, "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}}
    content = result_of(http, http.post("forward_backward", json=body), Accept="application/json")
    assert content["metrics"] == {"loss:sum": 6.0}
    assert content["loss_fn_outputs"][0]["logprobs"] == {"data": [-1.0, -2.0, -3.0], "dtype": "float32", "shape": [3]}


def test_the_forward_endpoint_of_older_clients(http: httpx.Client, server: Running, model_id: str) -> None:
    body = {"model_id": model_id, "seq_id": 1, "forward_input": {"data": [DATUM], "loss_fn": "cross_entropy"}}
    assert result_of(http, http.post("forward", json=body))["loss_fn_outputs"]
    (row,) = server.rows(Kind.FORWARD_BACKWARD)
    assert codec.message_from_bytes(row.payload).forward_only


def test_samples_in_json(http: httpx.Client) -> None:
    prompt, params = {"chunks": [{"tokens": [1, 2]}]}, {"max_tokens": 2}
    body = {**SAMPLE, "prompt": prompt, "sampling_params": params, "prompt_logprobs": True}
    content = result_of(http, http.post("asample", json=body))
    assert content["sequences"] == [{"stop_reason": "length", "tokens": [0, 0], "logprobs": [-0.5, -0.5]}]
    assert content["prompt_logprobs"] == [None, -1.0]


def test_unloading(http: httpx.Client, model_id: str) -> None:
    unloaded = http.post("unload_model", json={"model_id": model_id})
    assert result_of(http, unloaded) == {"model_id": model_id, "type": "unload_model"}
    late = http.post("optim_step", json={"model_id": model_id, **STEP})
    assert late.status_code == 400
    assert "was unloaded" in late.text


def test_polls_without_a_result(http: httpx.Client, server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    step = http.post("optim_step", json={"model_id": model_id, **STEP})
    started = time.monotonic()
    content = result_of(http, step)
    assert 0.4 < time.monotonic() - started < 20
    assert (content["type"], content["request_id"], content["queue_state"]) == (
        "try_again",
        step.json()["request_id"],
        "active",
    )


def test_many_clients_can_wait_for_one_result(server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    with server.client() as http:
        step = http.post("optim_step", json={"model_id": model_id, **STEP})
    threading.Timer(0.2, lambda: setattr(server, "is_engine_paused", False)).start()
    with ThreadPoolExecutor(10) as pool, server.client() as http:
        found = list(pool.map(lambda _: result_of(http, step), range(10)))
        assert all(one == {"metrics": {"skyrl.ai/grad_norm": 1.0}} for one in found)
        assert result_of(http, step) == found[0]
    assert server.service.promises.n_waiting == 0


def test_unknown_requests(http: httpx.Client) -> None:
    for name in ("999", "abc", "-1", "1" * 40, "\u0663"):
        assert http.post("retrieve_future", json={"request_id": name}).status_code == 404


def test_old_results_are_gone(http: httpx.Client, server: Running, model_id: str) -> None:
    step = http.post("optim_step", json={"model_id": model_id, "seq_id": 1, **STEP})
    assert result_of(http, step)["metrics"]

    def forget(db: Any) -> None:
        db.get(Request, int(step.json()["request_id"])).result = None

    server.change(forget)
    assert http.post("retrieve_future", json={"request_id": step.json()["request_id"]}).status_code == 410


def supervisor_of(folder: Path, program: str, *, pause_sec: float) -> Supervisor:
    """Return the supervisor of a stand-in for the engine."""
    command = (sys.executable, "-c", program)
    return Supervisor(config_for(folder), lambda: None, command=command, first_pause_sec=pause_sec)


def test_a_restarting_engine(tmp_path: Path) -> None:
    supervisor = supervisor_of(tmp_path, "import time; time.sleep(600)", pause_sec=60)
    with serving(tmp_path, engine=False, supervisor=supervisor, hold_sec=0.05) as running, running.client() as http:
        accepted = http.post("asample", json=SAMPLE)
        until(lambda: supervisor.is_running)
        assert "queue_state_reason" not in result_of(http, accepted)
        (engine,) = (one for one in psutil.Process().children() if "--doorbell-fd" in one.cmdline())
        engine.kill()
        until(lambda: not supervisor.is_running)
        content = result_of(http, accepted)
    assert (content["type"], content["queue_state"]) == ("try_again", "paused_capacity")
    assert content["queue_state_reason"] == "the engine died and is restarting; nothing is lost"


def test_an_engine_that_is_given_up(tmp_path: Path) -> None:
    """Waiting clients are notified at once."""
    supervisor = supervisor_of(tmp_path, "raise SystemExit('no such model')", pause_sec=0.1)
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
    supervisor = supervisor_of(tmp_path, f"raise SystemExit({UNUSABLE})", pause_sec=0.1)
    with serving(tmp_path, engine=False, supervisor=supervisor, hold_sec=40) as running, running.client() as http:
        accepted = http.post("asample", json=SAMPLE)
        until(lambda: supervisor.unusable is not None)
        assert result_of(http, accepted)["type"] == "try_again"


def test_a_model_of_another_base_model(http: httpx.Client, server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    waiting = http.post("optim_step", json={"model_id": model_id, **STEP})
    server.change(lambda db: setattr(db.get(Model, model_id), "base_model", "org/other"))
    content = result_of(http, waiting)
    assert (content["type"], content["queue_state"]) == ("try_again", "paused_capacity")
    assert content["queue_state_reason"] == f"it waits until org/other is served again; this server has {BASE_MODEL}"
    for path in ("optim_step", "unload_model"):
        refused = http.post(path, json={"model_id": model_id, **STEP})
        assert (refused.status_code, "needs the base model org/other" in refused.text) == (400, True)


def test_a_lost_model(http: httpx.Client, server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    waiting = http.post("optim_step", json={"model_id": model_id, **STEP})
    server.change(lambda db: setattr(db.get(Model, model_id), "lost_because", "MemoryError: no room"))
    content = result_of(http, waiting)
    words = f"model {model_id} could not be restored"
    assert (content["type"], content["queue_state"]) == ("try_again", "paused_capacity")
    assert content["queue_state_reason"] == f"{words}, and waits for the next start: MemoryError: no room"
    refused = http.post("optim_step", json={"model_id": model_id, **STEP})
    assert (refused.status_code, words in refused.text) == (400, True)


def test_cancelling(http: httpx.Client, server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    sample = http.post("asample", json=SAMPLE)
    assert http.post("cancel_future", json={"request_id": sample.json()["request_id"]}).status_code == 200
    assert result_of(http, sample) == {"error": "the request was cancelled", "category": "user"}
    step = http.post("optim_step", json={"model_id": model_id, **STEP})
    refused = http.post("cancel_future", json={"request_id": step.json()["request_id"]})
    assert refused.status_code == 400
    assert "is not a sample" in refused.text


def test_too_many_at_once(http: httpx.Client, server: Running, model_id: str) -> None:
    server.is_engine_paused = True
    assert [http.post("asample", json=SAMPLE).status_code for _ in range(7)] == [200] * 5 + [429] * 2
    step = http.post("optim_step", json={"model_id": model_id, **STEP})
    assert step.status_code == 200  # a separate queue
    assert "5 requests of the base model are pending" in http.post("asample", json=SAMPLE).text
    assert float(http.post("asample", json=SAMPLE).headers["retry-after-ms"]) == 1000


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"no zstd", {"Content-Encoding": "zstd"}, 400),
        (bytes(200_000), {}, 413),
        (b"x", {"Content-Encoding": "br"}, 415),
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
    assert http.post("session_heartbeat", json={"session_id": session_id}).status_code == 410


def test_failed_models(http: httpx.Client, server: Running, session_id: str) -> None:
    server.fails_with = ("no memory left", "server")
    assert result_of(http, new_model(http, session_id))["error"] == "no memory left"
    server.change(lambda db: setattr(db.get(Model, f"{session_id}:train:0"), "status", "failed"))
    late = http.post("optim_step", json={"model_id": f"{session_id}:train:0", **STEP})
    assert late.status_code == 400
    assert "could not be created: no memory left" in late.text
