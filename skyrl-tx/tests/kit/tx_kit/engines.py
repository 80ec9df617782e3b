"""A real engine in a thread of the test, with a minimal model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from sqlmodel import Session
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

from tx.tinker.backends.base import Backend
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.backends.jax.config import JaxConfig
from tx.tinker.db_models import EngineState, Request, RequestStatus
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.doorbell import Doorbell
from tx.tinker.engine.loop import Engine
from tx.tinker.server.auth import LOCAL_USER
from tx.tinker.store.database import open_database, writing
from tx.tinker.store.queries import pending_ids
from tx.tinker.submission import training as submission
from tx.tinker.submission.admission import Admission
from tx.tinker.submission.sampling import accept_sample, sample_request
from tx.tinker.submission.training import Submission
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import tinker_pb2 as pb
from tx_kit.servers import BASE_MODEL, Running, config_for, serving

T = TypeVar("T")
VOCABULARY, CONTEXT = 64, 128
SETTINGS = {"sample_lanes": 8, "sample_groups": 3, "cache_gib": 0.0006}


def write_model(folder: Path) -> None:
    """Save a model with one layer, 64 tokens and 128 positions."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, eos_token_id=2, **shape, **heads)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, "t0")).save(str(folder / "tokenizer.json"))


def new_backend(model: Path, *, kind: type[JaxBackend] = JaxBackend, **settings: Any) -> JaxBackend:
    """Create a backend; all share their compiled programs."""
    return kind(model, BASE_MODEL, JaxConfig(**{**SETTINGS, **settings}))


@contextmanager
def engine_for(running: Running, backend: Backend) -> Iterator[Engine]:
    """Run an engine within the block, and check that it does not die."""
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
        _wait_until_up(running, thread)
        yield engine
    finally:
        end.set()
        thread.join()
        engine.close()
    assert not died, died


def _wait_until_up(running: Running, thread: threading.Thread) -> None:
    is_up: list[EngineState] = []
    while not is_up and thread.is_alive():
        running.change(lambda db: is_up.extend(filter(None, [db.get(EngineState, 1)])))
        time.sleep(0.01)


@contextmanager
def serving_with_engine(folder: Path, model: Path, **settings: Any) -> Iterator[Running]:
    """Run a server with an engine."""
    with serving(folder, engine=False, **settings) as running, engine_for(running, new_backend(model)):
        yield running


class Desk:
    """Queues requests like the server, and runs an engine in the test's own thread."""

    def __init__(self, folder: Path, backend: Backend, **settings: Any) -> None:
        self.config = config_for(folder, **settings)
        self.database = open_database(self.config.database_url)
        self.admission = Admission.from_config(self.config)
        self.engine: Any = None
        self.start(backend)

    def start(self, backend: Backend) -> None:
        """Start another engine; the previous one counts as dead."""
        if self.engine is not None:
            self.engine.close()
        self.backend = backend
        self.engine = Engine(self.config, self.database, backend, Doorbell())

    def change(self, change: Callable[[Session], T]) -> T:
        """Run a transaction."""
        with writing(self.database) as db:
            return change(db)

    def submit(self, accept: Callable[[Submission], int]) -> int:
        """Queue a request; return its number."""
        return self.change(lambda db: accept(Submission(db, LOCAL_USER, self.config, self.admission)))

    def session(self, name: str = "s") -> str:
        """Create a session."""
        self.change(lambda db: db.add(ClientSession(session_id=name)))
        return name

    def model(self, session_id: str, number: int = 0, **lora: Any) -> str:
        """Queue the creation of a model."""
        body = wire.CreateModelRequest(
            session_id=session_id,
            model_seq_id=number,
            base_model=BASE_MODEL,
            lora_config=wire.LoraSettings(**{"rank": 2, "seed": 1, **lora}),
        )
        self.submit(lambda to: submission.create_model(to, body))
        return f"{session_id}:train:{number}"

    def train(
        self,
        model_id: str,
        tokens: Sequence[int] = (1, 2, 3),
        *,
        n_data: int = 1,
        weight: float = 1.0,
        is_forward_only: bool = False,
    ) -> int:
        """Queue a pass over a few tokens, each of which predicts the next; by default over the same ones."""
        targets = {"data": list(tokens[1:]), "dtype": "int64"}
        weights = {"data": [weight] * (len(tokens) - 1), "dtype": "float32"}
        datum = {
            "model_input": {"chunks": [{"tokens": list(tokens[:-1])}]},
            "loss_fn_inputs": {"target_tokens": targets, "weights": weights},
        }
        fields = {"data": [datum] * n_data, "loss_fn": "cross_entropy"}
        message = codec.message_from_json(model_id, None, fields, is_forward_only=is_forward_only)
        pass_, payload = codec.pass_of(message), message.SerializeToString()
        return self.submit(lambda to: submission.forward_backward(to, pass_, None, payload))

    def step(self, model_id: str, learning_rate: float = 0.1) -> int:
        """Queue an optimizer step."""
        body = wire.OptimStepRequest(model_id=model_id, adam_params=wire.AdamSettings(learning_rate=learning_rate))
        return self.submit(lambda to: submission.optim_step(to, body))

    def sample(self, prompt: Sequence[int] = (5, 6, 7), *, max_tokens: int | None = 4, **fields: Any) -> int:
        """Queue a sample, by default of the base model."""
        weights = {} if "model_path" in fields or "sampling_session_id" in fields else {"base_model": BASE_MODEL}
        body = wire.AsampleRequest(
            prompt=wire.ModelInput(chunks=[wire.Chunk(tokens=list(prompt))]),
            sampling_params=wire.SamplingSettings(max_tokens=max_tokens, seed=1),
            **weights,
            **fields,
        )
        return self.submit(lambda to: accept_sample(to, sample_request(to, body)))

    def work(self) -> None:
        """Run the engine until nothing is pending."""
        self.engine.serve(lambda: not self.change(pending_ids))

    def row(self, request_id: int) -> Request:
        """Return a request's row."""
        return self.change(lambda db: db.get_one(Request, request_id))

    def result(self, request_id: int) -> bytes:
        """Return the result of a finished request."""
        row = self.row(request_id)
        assert row.status is RequestStatus.DONE, row
        assert row.result is not None
        return row.result

    def loss(self, request_id: int) -> float:
        """Return the loss of a finished pass."""
        return float(pb.ForwardBackwardOutput.FromString(self.result(request_id)).metrics["loss:sum"])

    def close(self) -> None:
        """Close the engine and the database."""
        self.engine.close()
        self.database.dispose()
