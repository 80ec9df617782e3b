"""What is done for each kind of request of a model, but for passes and samples, which the loop does."""

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
from tx.tinker.checkpoint_files import TinkerPath, checkpoint_folder, fill_folder, give_name
from tx.tinker.config import TxConfig
from tx.tinker.database import reading
from tx.tinker.db_models import Checkpoint, CheckpointKind, Kind, Model, ModelStatus, Request, SamplingSession
from tx.tinker.engine.queue import Also, Outcome
from tx.tinker.engine.restore import RestorePoints
from tx.tinker.engine.samplers import Samplers
from tx.tinker.store import expiry
from tx.tinker.types import UserError
from tx.tinker.wire.requests import (
    CreateModelRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tx.tinker.wire.responses import ModelCreated, ModelUnloaded, SnapshotSaved, Stepped, WeightsLoaded, WeightsSaved

logger = logging.getLogger(__name__)

MAKING = (Kind.CREATE_MODEL, Kind.LOAD_WEIGHTS)
"""Kinds of the first request of a model."""


class Handlers:
    """One function for each kind."""

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
        """Do what is asked. What raises is the outcome; the model is what it was."""
        assert request.request_id is not None
        try:
            return self._by_kind[request.kind](request)
        except Exception as error:
            if not isinstance(error, UserError):
                logger.exception("request %d (%s) failed", request.request_id, request.kind)
            is_made = request.model_id in self._backend.models()
            also = None if is_made or request.kind not in MAKING else _set_status(request, ModelStatus.FAILED)
            return Outcome(request.request_id, error=error, also=also)

    # -- models

    def _create_model(self, request: Request) -> Outcome:
        asked = CreateModelRequest.model_validate_json(request.payload)
        with reading(self._database) as session:
            lora = LoraConfig(**session.get_one(Model, asked.model_id).lora)
        with self._unless_it_fails(asked.model_id, None):
            self._backend.create_model(asked.model_id, lora)
        return _done(request, ModelCreated(model_id=asked.model_id).to_bytes(), _made(request))

    def _load_weights(self, request: Request) -> Outcome:
        asked = LoadWeightsRequest.model_validate_json(request.payload)
        model_id = request.model_id
        assert model_id is not None
        assert request.request_id is not None
        folder = checkpoint_folder(self._config, asked.path)
        if not folder.is_dir():
            raise UserError(f"there is no checkpoint {asked.path}; it was deleted, or its time is over")
        before = self._backend.models().get(model_id)  # made by the request before, and nothing else
        with self._unless_it_fails(model_id, before):
            self._backend.delete_model(model_id)
            self._backend.load_model(model_id, folder, with_optimizer=asked.optimizer)
            self._points.write(model_id, request.request_id)  # the checkpoint may be deleted
        lora = self._backend.models()[model_id]
        return _done(request, WeightsLoaded(model_id=model_id, path=asked.path).to_bytes(), _made(request, lora))

    @contextmanager
    def _unless_it_fails(self, model_id: str, before: LoraConfig | None) -> Iterator[None]:
        """Make a model; if that fails, it is again as new as it was before, or not there."""
        try:
            yield
        except BaseException:
            self._backend.delete_model(model_id)
            if before is not None:
                self._backend.create_model(model_id, before)
            raise

    def _optim_step(self, request: Request) -> Outcome:
        assert request.model_id is not None
        asked = OptimStepRequest.model_validate_json(request.payload)
        metrics = self._backend.optim_step(request.model_id, asked.adam())
        return _done(request, Stepped(metrics=metrics).to_bytes())

    def _unload(self, request: Request) -> Outcome:
        assert request.model_id is not None
        self._backend.delete_model(request.model_id)
        self._points.delete(request.model_id)
        answer = ModelUnloaded(model_id=request.model_id)
        return _done(request, answer.to_bytes(), _set_status(request, ModelStatus.UNLOADED))

    # -- folders

    def _save_weights(self, request: Request) -> Outcome:
        asked = SaveWeightsRequest.model_validate_json(request.payload)
        path = TinkerPath(asked.model_id, CheckpointKind.TRAINING, asked.path or str(request.request_id))
        checkpoint = self._checkpoint(path, asked.ttl_seconds, asked.user_metadata)
        also = self._write(checkpoint, self._backend.save_model, overwrite=asked.overwrite)
        return _done(request, WeightsSaved(path=str(path), type="save_weights").to_bytes(), also)

    def _save_for_sampler(self, request: Request) -> Outcome:
        asked = SaveWeightsForSamplerRequest.model_validate_json(request.payload)
        if asked.path is not None:
            path = TinkerPath(asked.model_id, CheckpointKind.SAMPLER, asked.path)
            checkpoint = self._checkpoint(path, asked.ttl_seconds, asked.user_metadata)
            also = self._write(checkpoint, self._backend.save_weights)
            return _done(request, WeightsSaved(path=str(path), type="save_weights_for_sampler").to_bytes(), also)
        return self._keep_snapshot(request, asked)

    def _keep_snapshot(self, request: Request, asked: SaveWeightsForSamplerRequest) -> Outcome:
        assert asked.sampling_session_id is not None
        assert asked.sampling_session_seq_id is not None
        assert request.session_id is not None
        with reading(self._database) as session:
            if session.get(SamplingSession, asked.sampling_session_id) is not None:
                raise UserError(f"sampling session {asked.sampling_session_id} is there already; count up for each one")
        self._samplers.keep(asked.sampling_session_id, asked.model_id)
        kept = SamplingSession(
            sampling_session_id=asked.sampling_session_id,
            session_id=request.session_id,
            seq_id=asked.sampling_session_seq_id,
            base_model=self._backend.base_model.name,
            model_id=asked.model_id,
        )
        answer = SnapshotSaved(sampling_session_id=asked.sampling_session_id)
        return _done(request, answer.to_bytes(), lambda session: session.merge(kept))

    def _save_external(self, request: Request) -> Outcome:
        asked = SaveWeightsExternalRequest.model_validate_json(request.payload)
        path = TinkerPath(asked.model_id, CheckpointKind.EXTERNAL, asked.path)
        checkpoint = self._checkpoint(path, asked.ttl_seconds, None)
        also = self._write(checkpoint, self._backend.save_weights)
        answer = WeightsSaved(path=str(path), size_bytes=checkpoint.size_bytes, type="save_weights_external")
        return _done(request, answer.to_bytes(), also)

    def _write(self, new: Checkpoint, save: Callable[[str, Path], None], *, overwrite: bool = False) -> Also:
        """Write the files of a checkpoint, and note their size; what gives it its row and its name, both or none."""
        with reading(self._database) as session:
            is_there = session.get(Checkpoint, (new.model_id, new.kind, new.name)) is not None
        if is_there and not overwrite:
            fix = ", or overwrite it" if new.kind is CheckpointKind.TRAINING else ""
            raise UserError(f"there is a checkpoint {new.path} already; choose another name{fix}")
        folder = checkpoint_folder(self._config, new.path)
        complete = fill_folder(folder, partial(save, new.model_id))
        new.size_bytes = sum(file.stat().st_size for file in complete.iterdir())

        def also(session: Session) -> None:
            session.merge(new)
            session.flush()
            give_name(complete, folder)

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


def _made(request: Request, lora: LoraConfig | None = None) -> Also:
    """A model is there, unless it is not wanted any more."""

    def also(session: Session) -> None:
        model = session.get_one(Model, request.model_id)
        if model.status is ModelStatus.PENDING:
            model.status = ModelStatus.READY
        if lora is not None:
            model.rank, model.lora = lora.rank, asdict(lora)

    return also


def _done(request: Request, result: bytes, also: Also | None = None) -> Outcome:
    assert request.request_id is not None
    return Outcome(request.request_id, result, also=also)


def _set_status(request: Request, status: ModelStatus) -> Also:
    def also(session: Session) -> None:
        session.get_one(Model, request.model_id).status = status

    return also
