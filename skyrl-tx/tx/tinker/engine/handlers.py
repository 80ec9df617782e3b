"""Handlers for the requests of a model, except passes and samples, which the loop runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sqlalchemy import Engine as Database
from sqlmodel import Session

from tx.models.config import LoraConfig
from tx.tinker.backends.base import Backend
from tx.tinker.config import TxConfig
from tx.tinker.db_models import Checkpoint, CheckpointKind, Kind, Model, ModelStatus, Request, SamplingSession
from tx.tinker.engine.queue import Also, Outcome
from tx.tinker.engine.restore import RestorePoints
from tx.tinker.engine.samplers import Samplers
from tx.tinker.store.checkpoint_files import TinkerPath, checkpoint_folder, fill_folder, rename_into_place
from tx.tinker.store.database import reading
from tx.tinker.store.queries import expiry
from tx.tinker.types import UserError
from tx.tinker.wire.requests import (
    CreateModelRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tx.tinker.wire.responses import (
    ModelCreated,
    ModelUnloaded,
    OptimStepDone,
    SnapshotSaved,
    WeightsLoaded,
    WeightsSaved,
)

logger = logging.getLogger(__name__)

CREATING = (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS)
"""Kinds of requests that create a model."""


class Handlers:
    """The handlers of requests, one method per kind."""

    def __init__(
        self, config: TxConfig, database: Database, backend: Backend, points: RestorePoints, samplers: Samplers
    ) -> None:
        self._config = config
        self._database = database
        self._backend = backend
        self._points = points
        self._samplers = samplers
        self._by_kind: Mapping[Kind, Callable[[Request], Outcome]] = {
            Kind.CREATE_MODEL: self._create_model,
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.OPTIM_STEP: self._optim_step,
            Kind.SAVE_WEIGHTS: self._save_weights,
            Kind.SAVE_WEIGHTS_FOR_SAMPLER: self._save_for_sampler,
            Kind.SAVE_WEIGHTS_EXTERNAL: self._save_external,
            Kind.UNLOAD_MODEL: self._unload,
        }

    def handle(self, request: Request) -> Outcome:
        """Run a request and return its outcome. If it fails, the model is unchanged."""
        assert request.request_id is not None
        try:
            return self._by_kind[request.kind](request)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("request %d (%s) failed", request.request_id, request.kind)
            is_made = request.model_id in self._backend.models()
            also = None if is_made or request.kind not in CREATING else _set_status(request, ModelStatus.FAILED)
            return Outcome(request.request_id, error=error, also=also)

    # -- models

    def _create_model(self, request: Request) -> Outcome:
        body = CreateModelRequest.model_validate_json(request.payload)
        with reading(self._database) as session:
            lora = LoraConfig(**session.get_one(Model, body.model_id).lora)
        with self._rollback(body.model_id, None):
            self._backend.create_model(body.model_id, lora)
        return _done_outcome(request, ModelCreated(model_id=body.model_id).to_bytes(), _mark_ready(request))

    def _load_weights(self, request: Request) -> Outcome:
        body = LoadWeightsRequest.model_validate_json(request.payload)
        model_id = request.model_id
        assert model_id is not None
        assert request.request_id is not None
        folder = checkpoint_folder(self._config, body.path)
        if not folder.is_dir():
            raise UserError(f"there is no checkpoint {body.path}; it was deleted or has expired")
        before = self._backend.models().get(model_id)  # created by the previous request and otherwise unused
        with self._rollback(model_id, before):
            self._backend.delete_model(model_id)
            self._backend.load_model(model_id, folder, with_optimizer=body.optimizer)
            self._points.write(model_id, request.request_id)  # the checkpoint may be deleted later
        lora = self._backend.models()[model_id]
        return _done_outcome(
            request, WeightsLoaded(model_id=model_id, path=body.path).to_bytes(), _mark_ready(request, lora)
        )

    @contextmanager
    def _rollback(self, model_id: str, before: LoraConfig | None) -> Iterator[None]:
        """Restore the previous state of a model if its creation fails: untrained or absent."""
        try:
            yield
        except BaseException:
            self._backend.delete_model(model_id)
            if before is not None:
                self._backend.create_model(model_id, before)
            raise

    def _optim_step(self, request: Request) -> Outcome:
        assert request.model_id is not None
        body = OptimStepRequest.model_validate_json(request.payload)
        metrics = self._backend.optim_step(request.model_id, body.adam())
        return _done_outcome(request, OptimStepDone(metrics=metrics).to_bytes())

    def _unload(self, request: Request) -> Outcome:
        assert request.model_id is not None
        self._backend.delete_model(request.model_id)
        self._points.delete(request.model_id)
        response = ModelUnloaded(model_id=request.model_id)
        return _done_outcome(request, response.to_bytes(), _set_status(request, ModelStatus.UNLOADED))

    # -- folders

    def _save_weights(self, request: Request) -> Outcome:
        body = SaveWeightsRequest.model_validate_json(request.payload)
        path = TinkerPath(body.model_id, CheckpointKind.TRAINING, body.path or str(request.request_id))
        checkpoint = self._checkpoint(path, body.ttl_seconds, body.user_metadata)
        also = self._write(checkpoint, self._backend.save_model, overwrite=body.overwrite)
        return _done_outcome(request, WeightsSaved(path=str(path), type="save_weights").to_bytes(), also)

    def _save_for_sampler(self, request: Request) -> Outcome:
        body = SaveWeightsForSamplerRequest.model_validate_json(request.payload)
        if body.path is not None:
            path = TinkerPath(body.model_id, CheckpointKind.SAMPLER, body.path)
            checkpoint = self._checkpoint(path, body.ttl_seconds, body.user_metadata)
            also = self._write(checkpoint, self._backend.save_weights)
            return _done_outcome(
                request, WeightsSaved(path=str(path), type="save_weights_for_sampler").to_bytes(), also
            )
        return self._save_snapshot(request, body)

    def _save_snapshot(self, request: Request, body: SaveWeightsForSamplerRequest) -> Outcome:
        assert body.sampling_session_id is not None
        assert body.sampling_session_seq_id is not None
        assert request.session_id is not None
        with reading(self._database) as session:
            if session.get(SamplingSession, body.sampling_session_id) is not None:
                raise UserError(
                    f"sampling session {body.sampling_session_id} already exists; increment its number for each new one"
                )
        self._samplers.freeze(body.sampling_session_id, body.model_id)
        kept = SamplingSession(
            sampling_session_id=body.sampling_session_id,
            session_id=request.session_id,
            seq_id=body.sampling_session_seq_id,
            base_model=self._backend.base_model.name,
            model_id=body.model_id,
        )
        response = SnapshotSaved(sampling_session_id=body.sampling_session_id)
        return _done_outcome(request, response.to_bytes(), lambda session: session.merge(kept))

    def _save_external(self, request: Request) -> Outcome:
        body = SaveWeightsExternalRequest.model_validate_json(request.payload)
        path = TinkerPath(body.model_id, CheckpointKind.EXTERNAL, body.path)
        checkpoint = self._checkpoint(path, body.ttl_seconds, None)
        also = self._write(checkpoint, self._backend.save_weights)
        response = WeightsSaved(path=str(path), size_bytes=checkpoint.size_bytes, type="save_weights_external")
        return _done_outcome(request, response.to_bytes(), also)

    def _write(self, new: Checkpoint, save: Callable[[str, Path], None], *, overwrite: bool = False) -> Also:
        """Write the files of a checkpoint and record their size; return the change that adds its row and name, or
        neither.
        """
        with reading(self._database) as session:
            is_there = session.get(Checkpoint, (new.model_id, new.kind, new.name)) is not None
        if is_there and not overwrite:
            fix = ", or overwrite it" if new.kind is CheckpointKind.TRAINING else ""
            raise UserError(f"checkpoint {new.path} already exists; choose another name{fix}")
        folder = checkpoint_folder(self._config, new.path)
        complete = fill_folder(folder, partial(save, new.model_id))
        new.size_bytes = sum(file.stat().st_size for file in complete.iterdir())

        def also(session: Session) -> None:
            session.merge(new)
            session.flush()
            rename_into_place(complete, folder)

        return also

    def _checkpoint(
        self, path: TinkerPath, ttl_seconds: int | None, user_metadata: dict[str, str] | None
    ) -> Checkpoint:
        return Checkpoint(
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            base_model=self._backend.base_model.name,
            lora=asdict(self._backend.models()[path.model_id]),
            size_bytes=0,
            user_metadata=user_metadata,
            expires_at=expiry(ttl_seconds),
        )


def _mark_ready(request: Request, lora: LoraConfig | None = None) -> Also:
    """Return the change that marks a model as ready, unless it was cancelled."""

    def also(session: Session) -> None:
        model = session.get_one(Model, request.model_id)
        if model.status is ModelStatus.PENDING:
            model.status = ModelStatus.READY
        if lora is not None:
            model.rank, model.lora = lora.rank, asdict(lora)

    return also


def _done_outcome(request: Request, result: bytes, also: Also | None = None) -> Outcome:
    assert request.request_id is not None
    return Outcome(request.request_id, result, also=also)


def _set_status(request: Request, status: ModelStatus) -> Also:
    def also(session: Session) -> None:
        session.get_one(Model, request.model_id).status = status

    return also
