"""Samples on an external server do not wait for the engine. No engine runs in these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tx_kit.fake_engine import STATE
from tx_kit.servers import BASE_MODEL, SAMPLE, Running, serving, wait_until
from tx_kit.vllm import answering_server

from tx.models import peft
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    Request,
    RequestStatus,
    Session,
)
from tx.tinker.store.checkpoint_files import checkpoint_folder

Received = list[tuple[str, Any]]


@contextmanager
def dispatching(folder: Path, url: str, *, has_state: bool = True) -> Iterator[Running]:
    with serving(folder, engine=False, external_inference_url=url) as running:
        if has_state:
            running.change(lambda db: db.merge(EngineState(**STATE)))
        yield running


@pytest.fixture
def external() -> Iterator[tuple[str, Received]]:
    with answering_server() as server:
        yield server


def submit(running: Running, body: dict[str, Any], n: int = 1) -> list[str]:
    with running.client() as http:
        return [http.post("asample", json=body).json()["request_id"] for _ in range(n)]


def statuses(running: Running) -> set[RequestStatus]:
    return {one.status for one in running.rows(Kind.SAMPLE)}


def test_samples_need_no_engine(tmp_path: Path, external: tuple[str, Received]) -> None:
    with dispatching(tmp_path, external[0]) as running:
        (request_id,) = submit(running, SAMPLE)
        with running.client() as http:
            found = http.post("retrieve_future", json={"request_id": request_id}).json()
        assert [one["tokens"] for one in found["sequences"]] == [[3]]
        assert running.service.counts(None)["tokens_sampled"] == 1
        with running.client() as http:
            assert "tx_engine" in http.get(f"{running.url}/metrics").text


def test_samples_wait_for_the_state_of_the_model(tmp_path: Path, external: tuple[str, Received]) -> None:
    with dispatching(tmp_path, external[0], has_state=False) as running:
        submit(running, SAMPLE)
        assert statuses(running) == {RequestStatus.PENDING}
        running.change(lambda db: db.merge(EngineState(**STATE)))
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})


def test_adapters_are_loaded_from_checkpoints(tmp_path: Path, external: tuple[str, Received]) -> None:
    url, received = external
    with dispatching(tmp_path, url) as running:
        model = {"model_id": "s:train:0", "session_id": "s", "model_seq_id": 0, "base_model": BASE_MODEL, "rank": 4}
        kind, name = CheckpointKind.SAMPLER, "x"
        saved = Checkpoint(model_id="s:train:0", kind=kind, name=name, base_model=BASE_MODEL, lora={}, size_bytes=1)
        folder = checkpoint_folder(running.config, saved.path)
        folder.mkdir(parents=True)
        for file in (peft.CONFIG, peft.WEIGHTS):
            (folder / file).write_text("x")
        running.change(lambda db: db.add(Session(session_id="s")))
        running.change(lambda db: db.add_all([Model(**model, lora={}, status=ModelStatus.READY), saved]))
        submit(running, {**SAMPLE, "base_model": None, "model_path": saved.path}, n=2)
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})
        loads = [body for path, body in received if path == "/v1/load_lora_adapter"]
        assert len(loads) == 1
        assert {one.name for one in Path(loads[0]["lora_path"]).iterdir()} == {peft.CONFIG, peft.WEIGHTS}
        names = {body["model"] for path, body in received if path == "/v1/completions"}
        assert names == {loads[0]["lora_name"]}


def test_refusals_fail_single_samples(tmp_path: Path, external: tuple[str, Received]) -> None:
    with dispatching(tmp_path, external[0]) as running:
        submit(running, {**SAMPLE, "prompt": {"chunks": [{"tokens": [13]}]}})
        submit(running, SAMPLE)
        wait_until(lambda: RequestStatus.PENDING not in statuses(running))
        wrong, right = running.rows(Kind.SAMPLE)
    assert (wrong.error_category, right.status) == ("user", RequestStatus.DONE)
    assert "Requested sample logprobs of 32" in (wrong.error or "")


def test_one_of_several_servers_dispatches(tmp_path: Path, external: tuple[str, Received]) -> None:
    url, received = external
    with ExitStack() as stack:
        servers = [stack.enter_context(dispatching(tmp_path, url)) for _ in range(2)]
        for running in servers:
            submit(running, SAMPLE, n=10)
        wait_until(lambda: statuses(servers[0]) == {RequestStatus.DONE})
    assert len([path for path, _ in received if path == "/v1/completions"]) == 20


def test_samples_of_other_servers_do_not_wait_for_running_ones(tmp_path: Path, external: tuple[str, Received]) -> None:
    """The running sample is answered after the next one."""
    url, received = external
    with dispatching(tmp_path, url) as running, dispatching(tmp_path, url) as other:
        (first,) = submit(running, {**SAMPLE, "prompt": {"chunks": [{"tokens": [14]}]}})
        wait_until(lambda: bool(received))
        (second,) = submit(other, SAMPLE)
        wait_until(lambda: statuses(running) == {RequestStatus.DONE})
        ended = {str(one.request_id): one.completed_at for one in running.rows(Kind.SAMPLE)}
    assert ended[second] <= ended[first]  # type: ignore[operator]


def test_unfinished_samples_are_sent_again_after_a_restart(tmp_path: Path, external: tuple[str, Received]) -> None:
    """However often the server was killed: a sample on another server is not to blame."""
    with serving(tmp_path, engine=False) as running:
        (request_id,) = submit(running, SAMPLE)
        running.set(Request, int(request_id), n_tries=9)
    with dispatching(tmp_path, external[0]) as running:
        wait_until(lambda: RequestStatus.PENDING not in statuses(running))
        assert running.rows(Kind.SAMPLE)[-1].status is RequestStatus.DONE
