"""What an engine finds again after it was killed.

Every request is in the database, with what came of it. A model is the same again when its finished passes and steps are
done once more, in their order, from its beginning or from its last restore point: a backend computes the same to the
last bit. Restore points are folders as of `save_model`, so that there is never much to do again.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from sqlalchemy import Engine as Database
from sqlmodel import Session, select

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.checkpoint_files import checkpoint_folder
from tx.tinker.config import TxConfig
from tx.tinker.database import reading, writing
from tx.tinker.db_models import Kind, Model, ModelStatus, Request, RequestStatus
from tx.tinker.wire import codec
from tx.tinker.wire.requests import LoadWeightsRequest, OptimStepRequest

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 30.0


class RestorePoints:
    """The restore points of all models."""

    def __init__(self, config: TxConfig, database: Database, backend: Backend) -> None:
        self._config = config
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
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._backend.save_model(model_id, unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        with writing(self._database) as session:
            model = session.get_one(Model, model_id)
            model.restored_until = request_id
            session.add(model)
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
        self._written[model_id] = time.monotonic()

    def delete(self, model_id: str) -> None:
        """All of a model that is gone."""
        shutil.rmtree(self._of_model(model_id), ignore_errors=True)
        self._written.pop(model_id, None)

    def restore(self) -> None:
        """Bring back every model that was there."""
        with reading(self._database) as session:
            models = session.exec(select(Model).where(Model.status == ModelStatus.READY)).all()
            for model in models:
                started = time.monotonic()
                n_requests = self._restore(session, model)
                seconds = time.monotonic() - started
                logger.info("model %s is back: %d requests done again in %.1f s", model.model_id, n_requests, seconds)

    def _restore(self, session: Session, model: Model) -> int:
        point = self.folder(model.model_id, model.restored_until)
        if model.restored_until:
            self._backend.load_model(model.model_id, point, with_optimizer=True)
        else:
            self._begin(session, model)
        again = (
            select(Request)
            .where(
                Request.model_id == model.model_id,
                Request.status == RequestStatus.DONE,
                Request.request_id > model.restored_until,  # type: ignore[operator]
                Request.kind.in_((Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)),  # type: ignore[attr-defined]
            )
            .order_by(Request.request_id)  # type: ignore[arg-type]
        )
        n_requests = 0
        for request in session.exec(again):
            self._do_again(request)
            n_requests += 1
        return n_requests

    def _begin(self, session: Session, model: Model) -> None:
        first = select(Request).where(
            Request.model_id == model.model_id,
            Request.status == RequestStatus.DONE,
            Request.kind == Kind.LOAD_WEIGHTS,
        )
        loaded = session.exec(first).first()
        if loaded is None:
            self._backend.create_model(model.model_id, LoraConfig(**model.lora))
            return
        asked = LoadWeightsRequest.model_validate_json(loaded.payload)
        folder = checkpoint_folder(self._config, asked.path)
        self._backend.load_model(model.model_id, folder, with_optimizer=asked.optimizer)

    def _do_again(self, request: Request) -> None:
        assert request.model_id is not None
        if request.kind == Kind.OPTIM_STEP:
            asked = OptimStepRequest.model_validate_json(request.payload)
            self._backend.optim_step(request.model_id, asked.adam())
            return
        one = codec.pass_of(codec.message_from_bytes(request.payload))
        if not one.is_forward_only:
            for found in self._backend.passes([one]):
                if found is not None and isinstance(found[1], Exception):
                    raise found[1]

    def _of_model(self, model_id: str) -> Path:
        return self._config.checkpoints_base / "restore" / model_id.replace(":", "_")
