"""Samples on an external server do not wait for the engine. No engine runs in these tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tx_kit.fake_engine import STATE
from tx_kit.rows import add_all, checkpoint_row, model_row
from tx_kit.servers import BASE_MODEL, SAMPLE, Running, result_of, serving, wait_until
from tx_kit.vllm import External, answering_server

from tx.models import peft
from tx.tinker.db_models import CheckpointKind, ClientSession, EngineState, Kind, ModelStatus, RequestStatus, TxRequest
from tx.tinker.store.checkpoint_files import checkpoint_folder


@contextmanager
def dispatching(folder: Path, url: str, *, has_state: bool = True) -> Iterator[Running]:
    with serving(folder, engine=False, external_inference_url=url) as running:
        if has_state:
            running.change(lambda db: db.merge(EngineState(**STATE)))
        yield running


@pytest.fixture
def external() -> Iterator[External]:
    with answering_server() as server:
        yield server


def submit(running: Running, body: dict[str, Any], n: int = 1) -> list[str]:
    with running.client() as http:
        return [http.post("asample", json=body).json()["request_id"] for _ in range(n)]


def statuses(running: Running) -> set[RequestStatus]:
    return {one.status for one in running.rows(Kind.SAMPLE)}


def test_samples_need_no_engine(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url) as running, running.client() as http:
        found = result_of(http, http.post("asample", json=SAMPLE))
        assert [one["tokens"] for one in found["sequences"]] == [[3]]
        assert running.service.counts(None)["tokens_sampled"] == 1
        assert "tx_engine" in http.get(f"{running.url}/metrics").text


def test_samples_wait_for_the_state_of_the_model(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url, has_state=False) as running:
        submit(running, SAMPLE)
        assert statuses(running) == {RequestStatus.PENDING}
        running.change(lambda db: db.merge(EngineState(**STATE)))
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})


def test_adapters_are_loaded_from_checkpoints(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url) as running:
        model = model_row(base_model=BASE_MODEL, status=ModelStatus.READY)
        saved = checkpoint_row(kind=CheckpointKind.SAMPLER, base_model=BASE_MODEL)
        folder = checkpoint_folder(running.config, saved.path)
        folder.mkdir(parents=True)
        for file in (peft.CONFIG, peft.WEIGHTS):
            (folder / file).write_text("x")
        running.change(lambda db: add_all(db, ClientSession(session_id="s"), model, saved))
        submit(running, {**SAMPLE, "base_model": None, "model_path": saved.path}, n=2)
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})
        (load,) = external.bodies("/v1/load_lora_adapter")
        assert {one.name for one in Path(load["lora_path"]).iterdir()} == {peft.CONFIG, peft.WEIGHTS}
        assert {body["model"] for body in external.bodies("/v1/completions")} == {load["lora_name"]}


def test_refusals_fail_single_samples(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url) as running:
        submit(running, {**SAMPLE, "prompt": {"chunks": [{"tokens": [13]}]}})
        submit(running, SAMPLE)
        wait_until(lambda: RequestStatus.PENDING not in statuses(running))
        wrong, right = running.rows(Kind.SAMPLE)
    assert (wrong.error_category, right.status) == ("user", RequestStatus.DONE)
    assert "Requested sample logprobs of 32" in (wrong.error or "")


def test_one_of_several_servers_dispatches(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url) as running, dispatching(tmp_path, external.url) as other:
        for server in (running, other):
            submit(server, SAMPLE, n=10)
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})
        assert len(external.bodies("/v1/completions")) == 20


def test_samples_of_other_servers_do_not_wait_for_running_ones(tmp_path: Path, external: External) -> None:
    with dispatching(tmp_path, external.url) as running, dispatching(tmp_path, external.url) as other:
        submit(running, {**SAMPLE, "prompt": {"chunks": [{"tokens": [14]}]}})
        wait_until(lambda: external.bodies("/v1/completions"))
        submit(other, SAMPLE)
        held_and_done = [RequestStatus.PENDING, RequestStatus.DONE]
        wait_until(lambda: [one.status for one in running.rows(Kind.SAMPLE)] == held_and_done)
        external.may_answer.set()
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})


def test_unfinished_samples_are_sent_again_after_a_restart(tmp_path: Path, external: External) -> None:
    """However often the server was killed: a sample on another server is not to blame."""
    with serving(tmp_path, engine=False) as running:
        (request_id,) = submit(running, SAMPLE)
        running.set(TxRequest, int(request_id), n_tries=9)
    with dispatching(tmp_path, external.url) as running:
        wait_until(lambda: RequestStatus.PENDING not in statuses(running))
        assert running.rows(Kind.SAMPLE)[-1].status is RequestStatus.DONE
