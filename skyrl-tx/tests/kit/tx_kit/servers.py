"""A real server on a free port, and a thread that plays the engine on the real database."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import tinker
import uvicorn
from sqlmodel import Session, SQLModel

from tx.tinker.api import create_app
from tx.tinker.config import TxConfig
from tx.tinker.db_models import EngineState, Kind, TxRequest
from tx.tinker.server.service import Service
from tx.tinker.server.supervisor import Supervisor
from tx.tinker.store.database import writing
from tx_kit.databases import url_for
from tx_kit.fake_engine import STATE, answer_pending
from tx_kit.rows import change_row, read_row, read_rows

T = TypeVar("T")
R = TypeVar("R", bound=SQLModel)
BASE_MODEL = "org/tiny"
API_KEY = "tml-test"  # pragma: allowlist secret
SAMPLE = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}
"""The body of a request for one token."""
SECONDS = 60
"""Timeout for operations that take less than a second on an idle machine."""


class Address:
    """A port of this machine on which a server listens, and its clients."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> httpx.Client:
        """Return an HTTP client, for requests that the SDK never sends."""
        return httpx.Client(base_url=f"{self.url}/api/v1", headers=headers, timeout=30)

    def sdk(self, **options: Any) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=API_KEY, **options)


@dataclass
class Running(Address):
    service: Service
    port: int
    is_engine_paused: bool = False
    fails_with: tuple[str, str] | None = None  # error and category of the next requests, if they are to fail

    @property
    def config(self) -> TxConfig:
        return self.service.config

    def rest(self) -> tinker.RestClient:
        """Return a real client for listings."""
        return tinker.RestClient(base_url=self.url, api_key=API_KEY)

    def change(self, change: Callable[[Session], T]) -> T:
        with writing(self.service.database) as db:
            return change(db)

    def set(self, kind: type[Any], key: Any, **fields: Any) -> None:
        change_row(self.service.database, kind, key, **fields)

    def get(self, kind: type[R], key: Any) -> R:
        return read_row(self.service.database, kind, key)

    def model(self, **headers: str) -> str:
        with self.client(**headers) as http:
            session_id = new_session(http)
            return str(result_of(http, new_model(http, session_id))["model_id"])

    def rows(self, kind: Kind) -> list[TxRequest]:
        """Return all requests of a kind, in order."""
        return [one for one in read_rows(self.service.database, TxRequest) if one.kind == kind]


def new_session(http: httpx.Client) -> str:
    return str(http.post("create_session", json={"tags": [], "display_name": "<my run>"}).json()["session_id"])


def new_model(http: httpx.Client, session_id: str, number: int = 0, rank: int = 4) -> httpx.Response:
    fields = {"session_id": session_id, "model_seq_id": number, "base_model": BASE_MODEL, "lora_config": {"rank": rank}}
    return http.post("create_model", json=fields)


def new_sampler(http: httpx.Client, session_id: str, number: int = 0) -> str:
    fields = {"session_id": session_id, "sampling_session_seq_id": number, "base_model": BASE_MODEL}
    return str(http.post("create_sampling_session", json=fields).json()["sampling_session_id"])


def result_of(http: httpx.Client, accepted: httpx.Response, **headers: str) -> dict[str, Any]:
    assert accepted.status_code == 200, accepted.text
    body = {"request_id": accepted.json()["request_id"], "allow_metadata_only": True}
    return dict(http.post("retrieve_future", json=body, headers=headers).json())


def assert_refused(response: httpx.Response, words: str, status: int = 400) -> None:
    assert (response.status_code, words in response.json()["detail"]) == (status, True), response.text


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_true():
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
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server has died"
        time.sleep(0.01)
    running = Running(service, server.servers[0].sockets[0].getsockname()[1])
    rung, is_over = threading.Event(), threading.Event()

    def answer() -> None:
        while not is_over.is_set():
            rung.wait(0.1)  # if it was paused, there is no ring for what it missed
            rung.clear()
            if not running.is_engine_paused and running.change(
                lambda db: answer_pending(db, config, running.fails_with)
            ):
                service._wake_from_thread()

    answering = threading.Thread(target=answer, name="fake engine")
    if engine:
        running.change(lambda db: db.merge(EngineState(**STATE)))
        service.wake = rung.set  # type: ignore[method-assign]
        answering.start()
    try:
        yield running
    finally:
        is_over.set()
        rung.set()
        if engine:
            answering.join()
        service.promises.release()
        server.should_exit = True
        thread.join()
