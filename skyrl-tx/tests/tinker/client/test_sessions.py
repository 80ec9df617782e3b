"""Sessions of the real client, and its reaction to failures."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import tinker
from tinker import types
from tx_client import ADAM
from tx_kit.servers import BASE_MODEL, SECONDS, Running, until

from tx.tinker.db_models import Kind, Model, SessionStatus
from tx.tinker.db_models import Session as ClientSession


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions")
def test_sessions(
    server: Running, rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    session_id = training.model_id.partition(":")[0]
    assert session_id == rest.list_sessions(limit=1).result().sessions[0]
    found = rest.get_session(session_id).result()
    assert found.training_run_ids == [training.model_id]
    assert found.user_metadata == {"run": "test"}
    rest.assign_session_project(session_id, "project").result()
    page = rest.search_sessions(types.SessionSearchRequest(session_id=session_id, project_ids=["project"])).result()
    assert [one.session_id for one in page.sessions] == [session_id]
    models = rest.get_server_capabilities().result().supported_models
    assert [(one.model_name, one.max_context_length) for one in models] == [(BASE_MODEL, 64)]


def test_finishing_unloads(server: Running) -> None:
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4).result()
    client.close(status="errored", detail="by test")

    def unloaded() -> list[str | None]:
        return [one.model_id for one in server.rows(Kind.UNLOAD_MODEL)]

    until(lambda: training.model_id in unloaded())
    assert unloaded().count(training.model_id) == 1

    def check(db: Any) -> None:
        session = db.get(ClientSession, training.model_id.partition(":")[0])
        assert (session.status, session.end_reason) == (SessionStatus.FINISHED, "errored: by test")
        assert db.get(Model, training.model_id) is not None

    server.change(check)
    with server.client() as http:
        late = http.post("optim_step", json={"model_id": training.model_id, "seq_id": 1, "adam_params": {}})
    assert late.status_code == 400
    assert "is finished; create a new one" in late.text


def test_failures_of_the_engine_are_raised_at_once(server: Running, training: tinker.TrainingClient) -> None:
    try:
        for category in ("user", "server"):
            server.fails_with = (f"a fault of the {category}", category)
            with pytest.raises(tinker.RequestFailedError, match=f"a fault of the {category}") as raised:
                training.optim_step(ADAM).result()
            assert raised.value.category == category
    finally:
        server.fails_with = None


def test_polls_are_held(server: Running, training: tinker.TrainingClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server.is_engine_paused = True
    step = training.optim_step(ADAM)
    time.sleep(1)
    server.is_engine_paused = False
    assert step.result(timeout=SECONDS).metrics
    ending = f"request={server.rows(Kind.OPTIM_STEP)[-1].request_id}"

    def n_polls() -> int:
        return sum("retrieve_future" in line and line.endswith(ending) for line in caplog.messages)

    until(lambda: n_polls() > 0)  # the log line follows the reply
    assert n_polls() == 1
    assert not [line for line in caplog.messages if "because of try_again" in line]
