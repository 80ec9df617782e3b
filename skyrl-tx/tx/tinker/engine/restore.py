"""Restore models after the engine was killed.

The database holds every request and its result. A model is restored by repeating its finished passes and steps in
order, from its creation or last restore point: backends are deterministic to the last bit. A failed step is repeated by
dropping the gradients before it. Restore points are checkpoints that bound the work to repeat.

Example: a model was created, then trained for 40 steps of two passes each, with a restore point after step 30. After a
crash in step 41, the new engine loads the point and repeats 20 passes and 10 steps. A pass of step 41 that had finished
is repeated too, because its gradients were only in memory. A pass that was still running is pending again, and the
client notices only a delay.
"""

import logging
import shutil
import time
from concurrent import futures
from concurrent.futures import Executor, Future
from pathlib import Path

from sqlalchemy import ColumnElement, func, update
from sqlalchemy import Engine as Database
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import defer
from sqlmodel import col, select

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend, Save
from tx.tinker.config import TxConfig
from tx.tinker.db_models import GONE, Kind, Model, ModelStatus, RequestStatus, TxRequest
from tx.tinker.store.checkpoint_files import check_space, write_folder
from tx.tinker.store.database import reading, writing
from tx.tinker.store.queries import fail_waiting
from tx.tinker.types import TinkerError, error_text
from tx.tinker.wire import codec
from tx.tinker.wire.requests import OptimStepRequest

logger = logging.getLogger(__name__)

POINT_INTERVAL_SEC, INTERVALS_PER_WRITE = 30.0, 20
"""Minimum seconds between two restore points of a model, and the minimum ratio of this time to the writing time."""
RESTORABLE = (ModelStatus.READY, ModelStatus.UNLOADING)  # a model that is unloading may still have checkpoints to save
BATCH_SIZE = 16  # requests per query while repeating them


class RestorePoints:
    """The restore points of all models."""

    def __init__(self, config: TxConfig, database: Database, backend: Backend) -> None:
        self._config = config
        self._base = config.checkpoints_base / "restore"
        self._database = database
        self._backend = backend
        self._written: dict[str, tuple[float, float]] = {}  # monotonic time of the last write, and seconds
        self._writes: dict[str, Future[None]] = {}

    def folder(self, model_id: str, request_id: int) -> Path:
        """Return the folder of a restore point that includes all requests up to this one."""
        return self._base / model_id.replace(":", "_") / str(request_id)

    def is_due(self, model_id: str) -> bool:
        """Return True if a model needs a new restore point. This includes retries after a failed write."""
        now = time.monotonic()
        written_at, seconds = self._written.setdefault(model_id, (now, 0.0))
        return now - written_at > max(POINT_INTERVAL_SEC, INTERVALS_PER_WRITE * seconds)

    def is_writing(self, model_id: str) -> bool:
        """Return True if a restore point of a model is being written in the background."""
        return model_id in self._writes and not self._writes[model_id].done()

    def write(self, model_id: str, request_id: int) -> None:
        """Write a restore point of a model without gradients. All its requests up to `request_id` are done."""
        self._save(model_id, request_id, capture(self._config, self._backend, model_id, with_optimizer=True))

    def begin_write(self, model_id: str, request_id: int, writer: Executor) -> None:
        """Write a restore point like `write`, but in the background.

        Errors are only logged: a restart then has more to repeat, but nothing is lost.
        """
        save = capture(self._config, self._backend, model_id, with_optimizer=True)
        self._writes[model_id] = writer.submit(self._try_save, model_id, request_id, save)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        futures.wait(self._writes.values())

    def _try_save(self, model_id: str, request_id: int, save: Save) -> None:
        started = time.monotonic()
        try:
            self._save(model_id, request_id, save)
        except Exception as error:
            is_bug = not isinstance(error, TinkerError | OSError | SQLAlchemyError)
            logger.error("failed to write the restore point of model %s: %s", model_id, error, exc_info=is_bug)
        self._written[model_id] = time.monotonic(), time.monotonic() - started

    def _save(self, model_id: str, request_id: int, save: Save) -> None:
        folder = self.folder(model_id, request_id)
        write_folder(folder, save)
        with writing(self._database, is_durable=True) as session:  # durable, because the previous point is deleted next
            model = session.get_one(Model, model_id)
            model.restored_until = request_id
            session.add(model)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def delete(self, model_id: str) -> None:
        """Delete all restore points of a model."""
        write = self._writes.pop(model_id, None)
        if write is not None and not write.cancel():
            futures.wait([write])
        shutil.rmtree(self.folder(model_id, 0).parent, ignore_errors=True)
        self._written.pop(model_id, None)

    def restore(self) -> None:
        """Restore every model of the base model, except those that only wait to be unloaded.

        Models that fail wait for the next engine. The restore points of models that are gone are deleted.
        """
        is_only_unloading = _is_only_unloading()
        is_created = select(TxRequest.request_id).where(  # otherwise, the pending request will create it
            TxRequest.model_id == Model.model_id,
            TxRequest.status == RequestStatus.DONE,
            col(TxRequest.kind).in_((Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS)),
        )
        is_served = (Model.base_model == self._backend.base_model.name, col(Model.status).in_(RESTORABLE))
        with writing(self._database) as session:
            for folder in self._base.glob("*"):
                is_theirs = func.replace(col(Model.model_id), ":", "_") == folder.name
                if session.exec(select(Model.model_id).where(is_theirs, col(Model.status).in_(GONE))).first():
                    shutil.rmtree(folder, ignore_errors=True)
            session.exec(update(Model).where(is_only_unloading).values(lost_because=None))
            models = session.exec(select(Model).where(*is_served, is_created.exists(), ~is_only_unloading)).all()
        for model in models:
            started = time.monotonic()
            try:
                n_requests = self._restore(model)
            except Exception as error:
                logger.exception("failed to restore model %s", model.model_id)
                self._mark_lost(model, error_text(error))
                continue
            if model.lost_because is not None:
                with writing(self._database) as session:
                    session.get_one(Model, model.model_id).lost_because = None
            seconds = time.monotonic() - started
            logger.info("restored model %s: repeated %d requests in %.1f s", model.model_id, n_requests, seconds)

    def _mark_lost(self, model: Model, reason: str) -> None:
        """Mark a model as lost until the next engine.

        If it only waits to be unloaded, or was already lost while unloading, fail its pending requests instead.
        """
        self._backend.delete_model(model.model_id)
        with writing(self._database) as session:
            lost = session.get_one(Model, model.model_id)  # it may have been unloaded meanwhile
            is_leaving = session.exec(
                select(Model).where(Model.model_id == model.model_id, _is_only_unloading())
            ).first()
            if is_leaving or (lost.status is ModelStatus.UNLOADING and lost.lost_because is not None):
                fail_waiting(session, lost, reason)
            else:
                lost.lost_because = reason

    def _restore(self, model: Model) -> int:
        with reading(self._database) as session:
            if model.restored_until:
                point = self.folder(model.model_id, model.restored_until)
                self._backend.load_model(model.model_id, point, with_optimizer=True)
            else:  # not loaded from a checkpoint: a load writes a restore point immediately
                self._backend.create_model(model.model_id, AdapterConfig(**model.lora))
            is_step, is_done = TxRequest.kind == Kind.OPTIM_STEP, TxRequest.status == RequestStatus.DONE
            repeated = select(TxRequest).where(
                TxRequest.model_id == model.model_id,
                col(TxRequest.request_id) > model.restored_until,
                is_done & (is_step | (TxRequest.kind == Kind.FORWARD_BACKWARD))
                | is_step & (TxRequest.status == RequestStatus.FAILED),
            )
            in_order = repeated.order_by(col(TxRequest.request_id)).options(defer(col(TxRequest.result)))  # type: ignore[arg-type]
            n_requests = 0
            for request in session.exec(in_order.execution_options(yield_per=BATCH_SIZE)):
                self._repeat_request(request)
                n_requests += 1
            return n_requests

    def _repeat_request(self, request: TxRequest) -> None:
        assert request.model_id is not None
        if request.kind == Kind.OPTIM_STEP and request.status is RequestStatus.FAILED:
            self._backend.drop_gradients(request.model_id)
            return
        if request.kind == Kind.OPTIM_STEP:
            body = OptimStepRequest.model_validate_json(request.payload)
            self._backend.optim_step(request.model_id, body.adam())
            return
        pass_ = codec.pass_of(codec.message_from_bytes(request.payload), self._backend.read_image)
        if not pass_.is_forward_only:
            for _ in self._backend.compute(pass_):
                pass


def capture(config: TxConfig, backend: Backend, model_id: str, *, with_optimizer: bool) -> Save:
    """Capture a model's state like `Backend.capture`. The returned function raises TinkerError if the disk lacks space.

    Space is checked at the time of writing, because other writes may be waiting.
    """
    n_bytes = backend.n_bytes(model_id, with_optimizer=with_optimizer)
    save = backend.capture(model_id, with_optimizer=with_optimizer)

    def check_and_save(folder: Path) -> None:
        check_space(config, n_bytes)
        save(folder)

    return check_and_save


def _is_only_unloading() -> ColumnElement[bool]:
    """Match models whose only pending request is to unload them."""
    has_more = select(TxRequest.request_id).where(
        TxRequest.model_id == Model.model_id,
        TxRequest.status == RequestStatus.PENDING,
        col(TxRequest.kind) != Kind.UNLOAD_MODEL,
    )
    return (col(Model.status) == ModelStatus.UNLOADING) & ~has_more.exists()
