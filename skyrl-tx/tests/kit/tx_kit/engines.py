"""Real engines with the minimal model: in a thread beside a server, or in the test's own thread."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlmodel import Session

from tx.tinker.backends.base import Backend
from tx.tinker.backends.config import JaxConfig
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.db_models import ClientSession, EngineState, Model, RequestStatus, TxRequest
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine import loop
from tx.tinker.engine.loop import Engine
from tx.tinker.server.auth import LOCAL_USER
from tx.tinker.store.database import open_database, writing
from tx.tinker.store.queries import pending_ids
from tx.tinker.submission import training as submission
from tx.tinker.submission.admission import Admission
from tx.tinker.submission.sampling import accept_sample, sample_head, sample_request
from tx.tinker.submission.training import Submission
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import tinker_pb2 as pb
from tx_kit.fake_engine import no_images
from tx_kit.rows import change_row, read_row
from tx_kit.servers import BASE_MODEL, Running, config_for, serving

T = TypeVar("T")
SETTINGS = {"sample_lanes": 8, "sample_groups": 3, "cache_gib": 0.0006}


def load_backend(model: Path, kind: type[JaxBackend] = JaxBackend, name: str = BASE_MODEL, **settings: Any) -> Backend:
    """Load a backend; all share their compiled programs."""
    return kind(model, name, JaxConfig(**(SETTINGS | settings)))


@contextmanager
def engine_for(running: Running, backend: Backend) -> Iterator[Engine]:
    """Run an engine for a server within the block, and check that it does not die."""
    end = threading.Event()
    died: list[BaseException] = []
    engine = Engine(running.config, running.service.database, backend, Doorbell())

    def run() -> None:
        try:
            engine.run(end.is_set)
        except BaseException as error:
            died.append(error)
            raise

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        while thread.is_alive() and running.change(lambda db: db.get(EngineState, 1)) is None:
            time.sleep(0.01)
        yield engine
    finally:
        end.set()
        thread.join()
        engine.close()
    assert not died, died


@contextmanager
def serving_with_engine(folder: Path, backend: Backend, **settings: Any) -> Iterator[Running]:
    with serving(folder, engine=False, **settings) as running, engine_for(running, backend):
        yield running


class Desk:
    """Queues requests like the server, and runs an engine in the test's own thread."""

    def __init__(
        self, folder: Path, model: Path, *, kind: type[JaxBackend] = JaxBackend, name: str = BASE_MODEL, **settings: Any
    ) -> None:
        self.config = config_for(folder, base_model=name, **settings)
        self.database = open_database(self.config.database_url)
        self._admission = Admission.from_config(self.config)
        self._load = lambda **changed: load_backend(model, kind, name, **changed)
        self.engine: Any = None
        self.start()

    def close(self) -> None:
        self.engine.close()
        self.database.dispose()

    # -- the database

    def change(self, change: Callable[[Session], T]) -> T:
        with writing(self.database) as db:
            return change(db)

    def set(self, kind: type[Any], key: Any, **fields: Any) -> None:
        change_row(self.database, kind, key, **fields)

    def row(self, request_id: int) -> TxRequest:
        return read_row(self.database, TxRequest, request_id)

    def model_row(self, model_id: str) -> Model:
        return read_row(self.database, Model, model_id)

    def error(self, request_id: int) -> tuple[str | None, str]:
        row = self.row(request_id)
        return row.error_category, row.error or ""

    def result(self, request_id: int) -> bytes:
        row = self.row(request_id)
        assert row.status is RequestStatus.DONE, row
        assert row.result is not None
        return row.result

    def loss(self, request_id: int) -> float:
        return float(pb.ForwardBackwardOutput.FromString(self.result(request_id)).metrics["loss:sum"])

    # -- requests

    def submit(self, accept: Callable[[Submission], int]) -> int:
        return self.change(lambda db: accept(Submission(db, LOCAL_USER, self.config, self._admission)))

    def session(self, name: str = "s") -> str:
        self.change(lambda db: db.add(ClientSession(session_id=name)))
        return name

    def models(self, n: int = 2) -> list[str]:
        """Queue the creation of equal models of a new session."""
        session = self.session()
        return [self.model(session, number) for number in range(n)]

    def model(self, session_id: str | None = None, number: int = 0, **lora: Any) -> str:
        """Queue the creation of a model, by default of a new session."""
        session_id = session_id or self.session()
        body = wire.CreateModelRequest(
            session_id=session_id,
            model_seq_id=number,
            base_model=BASE_MODEL,
            lora_config=wire.LoraSettings(**{"rank": 2, "seed": 1, **lora}),
        )
        self.submit(lambda to: submission.create_model(to, body))
        return f"{session_id}:train:{number}"

    def run_pass(
        self,
        model_id: str,
        tokens: Sequence[int] = (1, 2, 3),
        *,
        n_data: int = 1,
        weight: float = 1.0,
        is_forward_only: bool = False,
    ) -> int:
        """Queue a pass over a few tokens, each of which predicts the next."""
        targets = {"data": list(tokens[1:]), "dtype": "int64"}
        weights = {"data": [weight] * (len(tokens) - 1), "dtype": "float32"}
        datum = {
            "model_input": {"chunks": [{"tokens": list(tokens[:-1])}]},
            "loss_fn_inputs": {"target_tokens": targets, "weights": weights},
        }
        fields = {"data": [datum] * n_data, "loss_fn": "cross_entropy"}
        message = codec.message_from_json(model_id, None, fields, is_forward_only=is_forward_only)
        pass_, payload = codec.pass_of(message, no_images), message.SerializeToString()
        return self.submit(lambda to: submission.forward_backward(to, pass_, None, payload))

    def score(self, model_id: str, tokens: Sequence[int] = (1, 2, 3)) -> int:
        return self.run_pass(model_id, tokens, is_forward_only=True)

    def step(self, model_id: str, learning_rate: float = 0.1) -> int:
        body = wire.OptimStepRequest(model_id=model_id, adam_params=wire.AdamSettings(learning_rate=learning_rate))
        return self.submit(lambda to: submission.optim_step(to, body))

    def train(self, model_id: str, tokens: Sequence[int] = (1, 2, 3)) -> int:
        self.run_pass(model_id, tokens)
        return self.step(model_id)

    def sample(self, prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int | None = 4, **fields: Any) -> int:
        """Queue a sample, by default of the base model."""
        weights = {} if "model_path" in fields or "sampling_session_id" in fields else {"base_model": BASE_MODEL}
        body = wire.AsampleRequest(
            prompt=wire.ModelInput(chunks=[wire.Chunk(tokens=list(prompt))]),
            sampling_params=wire.SamplingSettings(max_tokens=max_tokens, seed=1),
            **weights,
            **fields,
        )
        return self.submit(lambda to: accept_sample(to, sample_request(sample_head(to, body), body)))

    def save(self, model_id: str, path: str = "x", **fields: Any) -> int:
        """Queue a checkpoint, `tinker://<model>/weights/<path>`."""
        body = wire.SaveWeightsRequest(model_id=model_id, path=path, **fields)
        return self.submit(lambda to: submission.save_weights(to, body))

    def save_for_sampler(self, model_id: str, path: str | None = None, **fields: Any) -> int:
        """Queue a checkpoint to sample from, or an unnamed one."""
        body = wire.SaveWeightsForSamplerRequest(model_id=model_id, path=path, **fields)
        return self.submit(lambda to: submission.save_weights_for_sampler(to, body))

    def load(self, path: str, *, optimizer: bool = True, **target: Any) -> int:
        """Queue loading a checkpoint: into `model_id`, or into model `model_seq_id` of the session s."""
        if "model_id" not in target:
            target["session_id"] = "s"
        body = wire.LoadWeightsRequest(path=path, optimizer=optimizer, **target)
        return self.submit(lambda to: submission.load_weights(to, body))

    def unload(self, model_id: str) -> int:
        return self.submit(lambda to: submission.unload_model(to, wire.ModelRequest(model_id=model_id)))

    # -- the engine

    def start(self, **settings: Any) -> None:
        """Start another engine; the previous one counts as dead."""
        if self.engine is not None:
            self.engine.close()
        self.backend: Any = self._load(**settings)
        self.engine = Engine(self.config, self.database, self.backend, Doorbell())

    def restart(self) -> None:
        """Start another engine as after `kill -9`, and restore the models."""
        self.start()
        self.engine._points.restore()

    def fetch(self) -> None:
        """Let the engine find new requests and cancellations, as if the server had rung."""
        self.engine._queue.fetch()

    def work(self) -> None:
        """Run the engine until nothing is pending."""
        self.engine.serve(lambda: not self.change(pending_ids))

    def work_until_done(self, *request_ids: int) -> None:
        """Run the engine until these requests are done; others may still be pending."""
        self.fetch()
        while any(self.row(one).status is RequestStatus.PENDING for one in request_ids):
            self.engine.work()

    def begin_points(self) -> None:
        """Begin to write restore points, as an idle engine does after a while."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
            self.engine._write_points()

    def write_points(self) -> None:
        self.begin_points()
        self.engine._points.wait()

    def report(self) -> None:
        """Report the engine's state, and evict deleted weights, as an engine does every second."""
        self.engine._state_at = 0.0
        self.engine._report()

    def state(self) -> EngineState:
        return read_row(self.database, EngineState, 1)

    def current_loss(self, model_id: str) -> float:
        scored = self.score(model_id, (7, 8, 9))
        self.work()
        return self.loss(scored)

    def probe(self, model_id: str) -> float:
        """Return a number that depends on every weight and, through a step, on the optimizer."""
        self.train(model_id, (3, 4, 5))
        return self.current_loss(model_id)
