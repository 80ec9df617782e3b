"""What an engine finds again after it was killed.

Every request is in the database, with what came of it. A model is the same again when its finished passes and steps are
done once more, in their order, from its beginning or from its last restore point: a backend computes the same to the
last bit. Restore points are folders as of `save_model`, so that there is never much to do again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, func, update
from sqlalchemy import Engine as Database
from sqlalchemy.orm import defer
from sqlmodel import col, select
from sqlmodel.sql.expression import SelectOfScalar

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.checkpoint_files import write_folder
from tx.tinker.config import TxConfig
from tx.tinker.database import reading, writing
from tx.tinker.db_models import GONE, Kind, Model, ModelStatus, Request, RequestStatus
from tx.tinker.engine.queue import in_words
from tx.tinker.store import fail_waiting
from tx.tinker.wire import codec
from tx.tinker.wire.requests import OptimStepRequest

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 30.0
THERE = (ModelStatus.READY, ModelStatus.UNLOADING)  # the latter may have something to save before it goes
AT_ONCE = 16  # requests that are read at once to be done again


class RestorePoints:
    """The restore points of all models."""

    def __init__(self, config: TxConfig, database: Database, backend: Backend) -> None:
        self._base = config.checkpoints_base / "restore"
        self._database = database
        self._backend = backend
        self._written: dict[str, float] = {}  # when, by the clock of this process

    def folder(self, model_id: str, request_id: int) -> Path:
        """Of a restore point that has seen requests up to this one."""
        return self._of_model(model_id) / str(request_id)

    def is_due(self, model_id: str) -> bool:
        """Whether a model has gone on for long enough without one."""
        return time.monotonic() - self._written.setdefault(model_id, time.monotonic()) > SECONDS_BETWEEN

    def write(self, model_id: str, request_id: int) -> None:
        """A restore point of a model that has no gradients, all of whose requests up to this one are done."""
        folder = self.folder(model_id, request_id)
        write_folder(folder, partial(self._backend.save_model, model_id))
        with writing(self._database, is_durable=True) as session:  # the one before is deleted
            model = session.get_one(Model, model_id)
            model.restored_until = request_id
            session.add(model)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        self._written[model_id] = time.monotonic()

    def delete(self, model_id: str) -> None:
        """All of a model that is gone."""
        shutil.rmtree(self._of_model(model_id), ignore_errors=True)
        self._written.pop(model_id, None)

    def restore(self) -> None:
        """Bring back every model of the base model. One that cannot be brought back is left to the next engine."""
        self._delete_left()
        for model in self._wanted():
            started = time.monotonic()
            try:
                n_requests = self._restore(model)
            except Exception as error:
                logger.exception("model %s cannot be brought back", model.model_id)
                self._lose(model, in_words(error))
                continue
            if model.lost_because is not None:
                with writing(self._database) as session:
                    session.get_one(Model, model.model_id).lost_because = None
            seconds = time.monotonic() - started
            logger.info("model %s is back: %d requests done again in %.1f s", model.model_id, n_requests, seconds)

    def _wanted(self) -> Sequence[Model]:
        """All but those that are only to be unloaded, which can be done without them."""
        served = (Model.base_model == self._backend.base_model.name, col(Model.status).in_(THERE))
        with writing(self._database) as session:
            session.exec(update(Model).where(_is_leaving()).values(lost_because=None))
            return session.exec(select(Model).where(*served, _is_made().exists(), ~_is_leaving())).all()

    def _delete_left(self) -> None:
        """Those of models that are gone."""
        with reading(self._database) as session:
            for folder in self._base.glob("*"):
                is_theirs = func.replace(col(Model.model_id), ":", "_") == folder.name
                if session.exec(select(Model.model_id).where(is_theirs, col(Model.status).in_(GONE))).first():
                    shutil.rmtree(folder, ignore_errors=True)

    def _lose(self, model: Model, reason: str) -> None:
        """A model waits for the next engine; but only once, where nobody can ask anything of it any more."""
        self._backend.delete_model(model.model_id)
        with writing(self._database) as session:
            lost = session.get_one(Model, model.model_id)  # it may have been unloaded meanwhile
            is_leaving = session.exec(select(Model).where(Model.model_id == model.model_id, _is_leaving())).first()
            if is_leaving or (lost.status is ModelStatus.UNLOADING and lost.lost_because is not None):
                fail_waiting(session, lost, reason)
            else:
                lost.lost_because = reason

    def _restore(self, model: Model) -> int:
        with reading(self._database) as session:
            if model.restored_until:
                point = self.folder(model.model_id, model.restored_until)
                self._backend.load_model(model.model_id, point, with_optimizer=True)
            else:  # it was not loaded from a checkpoint, after which there is a restore point at once
                self._backend.create_model(model.model_id, LoraConfig(**model.lora))
            again = select(Request).where(
                Request.model_id == model.model_id,
                Request.status == RequestStatus.DONE,
                col(Request.request_id) > model.restored_until,
                col(Request.kind).in_((Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)),
            )
            in_order = again.order_by(col(Request.request_id)).options(defer(col(Request.result)))  # type: ignore[arg-type]
            n_requests = 0
            for request in session.exec(in_order.execution_options(yield_per=AT_ONCE)):
                self._do_again(request)
                n_requests += 1
            return n_requests

    def _do_again(self, request: Request) -> None:
        assert request.model_id is not None
        if request.kind == Kind.OPTIM_STEP:
            asked = OptimStepRequest.model_validate_json(request.payload)
            self._backend.optim_step(request.model_id, asked.adam())
            return
        one = codec.pass_of(codec.message_from_bytes(request.payload))
        if not one.is_forward_only:
            for _ in self._backend.compute(one):
                pass

    def _of_model(self, model_id: str) -> Path:
        return self._base / model_id.replace(":", "_")


def _is_leaving() -> ColumnElement[bool]:
    """A model that is only to be unloaded."""
    has_more = select(Request.request_id).where(
        Request.model_id == Model.model_id,
        Request.status == RequestStatus.PENDING,
        col(Request.kind) != Kind.UNLOAD_MODEL,
    )
    return (col(Model.status) == ModelStatus.UNLOADING) & ~has_more.exists()


def _is_made() -> SelectOfScalar[Any]:
    """The request that made a model: one that is still to be done will make it."""
    return select(Request.request_id).where(
        Request.model_id == Model.model_id,
        Request.status == RequestStatus.DONE,
        col(Request.kind).in_((Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS)),
    )
