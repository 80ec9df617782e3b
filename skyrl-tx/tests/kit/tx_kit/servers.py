"""A real server on a free port, and a thread that plays the engine on the real database."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import tinker
import uvicorn
from sqlmodel import Session, col, select

from tx.tinker.api import create_app
from tx.tinker.config import TxConfig
from tx.tinker.db_models import (
    Checkpoint,
    CheckpointKind,
    EngineState,
    Kind,
    Model,
    ModelStatus,
    Request,
    RequestStatus,
    SamplingSession,
    now,
)
from tx.tinker.server.service import Service
from tx.tinker.server.supervisor import Supervisor
from tx.tinker.store.checkpoint_files import TinkerPath, checkpoint_folder
from tx.tinker.store.database import reading, writing
from tx.tinker.store.queries import expiry
from tx.tinker.types import Datum, PassResult, Sample, SampleResult
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses
from tx.tinker.wire.sample_job import SampleJob
from tx_kit.databases import url_for

T = TypeVar("T")
BASE_MODEL = "org/tiny"
CHILD_ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
"""The environment of child processes, which import what the test imports."""

SECONDS = 60
"""Timeout for operations that take less than a second on an idle machine."""
VOCABULARY = 100
CONTEXT = 64
STATE = {
    "base_model": BASE_MODEL,
    "vocab_size": VOCABULARY,
    "max_context": CONTEXT,
    "eos_ids": [2],
    "can_train_all": False,
    "has_tokenizer": True,
}
KINDS = {
    Kind.SAVE_WEIGHTS: CheckpointKind.TRAINING,
    Kind.SAVE_WEIGHTS_FOR_SAMPLER: CheckpointKind.SAMPLER,
    Kind.SAVE_WEIGHTS_EXTERNAL: CheckpointKind.EXTERNAL,
}


@dataclass
class Running:
    """A running server, and the requests that its engine has received."""

    service: Service
    port: int
    is_engine_paused: bool = False
    fails_with: tuple[str, str] | None = None  # error and category of the next requests, if they are to fail
    done: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> TxConfig:
        """The server's settings."""
        return self.service.config

    def client(self, **headers: str) -> httpx.Client:
        """Return an HTTP client, for requests that the SDK never sends."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30)

    def sdk(self, **options: Any) -> tinker.ServiceClient:
        """Return a real client."""
        return tinker.ServiceClient(base_url=self.url, api_key="tml-test", **options)  # pragma: allowlist secret

    def change(self, change: Callable[[Session], T]) -> T:
        """Run a transaction."""
        with writing(self.service.database) as db:
            return change(db)

    def model(self, **headers: str) -> str:
        """Create a session and a model."""
        with self.client(**headers) as http:
            session_id = new_session(http)
            return str(result_of(http, new_model(http, session_id))["model_id"])

    def rows(self, kind: Kind) -> list[Request]:
        """Return all requests of a kind, in order."""
        with reading(self.service.database) as db:
            return list(db.exec(select(Request).where(Request.kind == kind).order_by(col(Request.request_id))))


def new_session(http: httpx.Client) -> str:
    """Create a session over HTTP."""
    return str(http.post("create_session", json={"tags": [], "display_name": "<my run>"}).json()["session_id"])


def new_model(http: httpx.Client, session_id: str, number: int = 0, rank: int = 4) -> httpx.Response:
    """Request a model; return the response."""
    fields = {"session_id": session_id, "model_seq_id": number, "base_model": BASE_MODEL, "lora_config": {"rank": rank}}
    return http.post("create_model", json=fields)


def new_sampler(http: httpx.Client, session_id: str, number: int = 0) -> str:
    """Create a sampling session of the base model."""
    fields = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": BASE_MODEL}
    return str(http.post("create_sampling_session", json=fields).json()["sampling_session_id"])


def result_of(http: httpx.Client, accepted: httpx.Response, **headers: str) -> dict[str, Any]:
    """Poll once for the result of an accepted request."""
    assert accepted.status_code == 200, accepted.text
    body = {"request_id": accepted.json()["request_id"], "allow_metadata_only": True}
    return dict(http.post("retrieve_future", json=body, headers=headers).json())


def until(is_so: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def config_for(folder: Path, **settings: Any) -> TxConfig:
    """Return settings with the state in a folder, and the database under test."""
    fields = {"base_model": BASE_MODEL, "database_url": url_for(folder), "start_engine": False, "port": 0, **settings}
    return TxConfig(checkpoints_base=folder, **fields)


@contextmanager
def serving(
    folder: Path, *, engine: bool = True, supervisor: Supervisor | None = None, **settings: Any
) -> Iterator[Running]:
    """Run a server with its state in a folder."""
    config = config_for(folder, **settings)
    service = Service(config, supervisor)
    server = uvicorn.Server(
        uvicorn.Config(create_app(config, service), port=0, root_path=config.root_path, log_level="warning")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has died"
        time.sleep(0.01)
    running = Running(service, server.servers[0].sockets[0].getsockname()[1])
    end = threading.Event()
    player = threading.Thread(target=_play, args=(running, end))
    if engine:
        running.change(lambda db: db.merge(EngineState(**STATE)))
        player.start()
    try:
        yield running
    finally:
        end.set()
        if engine:
            player.join()
        service.promises.release()
        server.should_exit = True
        thread.join()


def _play(running: Running, end: threading.Event) -> None:
    while not end.wait(0.005):
        if not running.is_engine_paused:
            running.change(lambda db: answer_pending(db, running))


def answer_pending(db: Session, running: Running) -> None:
    """Answer pending requests like an engine, without computing."""
    waiting = select(Request).where(Request.status == RequestStatus.PENDING).order_by(col(Request.request_id))
    for request in db.exec(waiting).all():
        request.completed_at = now()
        if running.fails_with is not None:
            request.status = RequestStatus.FAILED
            request.error, request.error_category = running.fails_with
        else:
            request.status = RequestStatus.DONE
            request.result, request.is_result_protobuf = _result(db, request, running.config)
        running.done.append(request)


def _result(db: Session, request: Request, config: TxConfig) -> tuple[bytes, bool]:
    if request.kind is Kind.FORWARD_BACKWARD:
        pass_ = codec.pass_of(codec.message_from_bytes(request.payload))
        return codec.forward_backward_bytes(pass_result(pass_.data)), True
    if request.kind is Kind.SAMPLE:
        return codec.sample_bytes(sample_result(SampleJob.model_validate_json(request.payload))), True
    return _answer(db, request, config).to_bytes(), False


def pass_result(data: list[Datum] | Any) -> PassResult:
    """Return log-probs of -1, -2, …, whose sum is the loss."""
    logprobs = [-np.arange(1, datum.inputs["target_tokens"].size + 1, dtype=np.float32) for datum in data]
    shaped = [row.reshape(datum.inputs["target_tokens"].shape) for row, datum in zip(logprobs, data, strict=True)]
    return PassResult(-float(sum(row.sum() for row in logprobs)), shaped, [-row for row in shaped])


def sample_result(job: SampleJob) -> SampleResult:
    """Return samples 0 0 …, 1 1 …, of the maximum length."""
    n_tokens = min(job.max_tokens or 4, 4)
    samples = [Sample([number] * n_tokens, [-0.5] * n_tokens, is_stopped=False) for number in range(job.n_samples)]
    logprobs = np.array([np.nan, *itertools.repeat(-1.0, len(job.prompt) - 1)], np.float32)
    return SampleResult(samples, logprobs if job.wants_prompt_logprobs else None)


def _answer(db: Session, request: Request, config: TxConfig) -> responses.ResponseBody:
    model = db.get_one(Model, request.model_id)
    if request.kind is Kind.CREATE_MODEL:
        model.status = ModelStatus.READY
        return responses.ModelCreated(model_id=model.model_id)
    if request.kind is Kind.LOAD_WEIGHTS:
        model.status = ModelStatus.READY
        body = wire.LoadWeightsRequest.model_validate_json(request.payload)
        return responses.WeightsLoaded(model_id=model.model_id, path=body.path)
    if request.kind is Kind.UNLOAD_MODEL:
        model.status = ModelStatus.UNLOADED
        return responses.ModelUnloaded(model_id=model.model_id)
    if request.kind is Kind.OPTIM_STEP:
        return responses.OptimStepDone(metrics={"skyrl.ai/grad_norm": 1.0})
    return _save_sampler(db, request, model, config)


def _save_sampler(db: Session, request: Request, model: Model, config: TxConfig) -> responses.ResponseBody:
    body = wire.SaveWeightsForSamplerRequest.model_validate_json(request.payload)
    if body.sampling_session_id is not None:
        db.add(
            SamplingSession(
                sampling_session_id=body.sampling_session_id,
                session_id=model.session_id,
                seq_id=body.sampling_session_seq_id,
                base_model=model.base_model,
                model_id=model.model_id,
            )
        )
        return responses.SnapshotSaved(sampling_session_id=body.sampling_session_id)
    path = TinkerPath(model.model_id, KINDS[request.kind], body.path or "")
    folder = checkpoint_folder(config, str(path))
    (folder / "more").mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "more" / "weights.bin").write_bytes(bytes(range(256)) * 10)
    db.merge(
        Checkpoint(
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            base_model=model.base_model,
            lora=model.lora,
            size_bytes=2568,
            user_metadata=body.user_metadata,
            expires_at=expiry(body.ttl_seconds),
        )
    )
    return responses.WeightsSaved(path=str(path), type=request.kind.value)
