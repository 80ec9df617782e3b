"""Handlers for a model's requests, except passes and samples: the loop runs these."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial

from sqlalchemy import Engine as Database
from sqlmodel import Session

from tx.models.config import AdapterConfig
from tx.tinker.backends.base import Backend
from tx.tinker.config import TxConfig
from tx.tinker.db_models import Checkpoint, CheckpointKind, Kind, Model, ModelStatus, SamplingSession, TxRequest
from tx.tinker.engine.passes import failed_outcome
from tx.tinker.engine.queue import Also, RequestOutcome
from tx.tinker.engine.restore import RestorePoints, capture
from tx.tinker.engine.samplers import Samplers
from tx.tinker.store.checkpoint_files import (
    TinkerPath,
    checkpoint_folder,
    fill_folder,
    rename_into_place,
    snapshot_folder,
    write_folder,
)
from tx.tinker.store.database import reading
from tx.tinker.store.queries import expiry, failed_passes
from tx.tinker.types import TinkerError, UserError
from tx.tinker.wire import codec
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
    ResponseBody,
    SnapshotSaved,
    WeightsLoaded,
    WeightsSaved,
)

Write = Callable[[], RequestOutcome]
"""The rest of a saving request. It only writes files, in any thread. The model's next request waits for it."""
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
        self._unfinished_snapshots: set[str] = set()
        self._by_kind: Mapping[Kind, Callable[[TxRequest], RequestOutcome | Write]] = {
            Kind.CREATE_MODEL: self._create_model,
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.OPTIM_STEP: self._optim_step,
            Kind.SAVE_WEIGHTS: self._save_weights,
            Kind.SAVE_WEIGHTS_FOR_SAMPLER: self._save_for_sampler,
            Kind.SAVE_WEIGHTS_EXTERNAL: self._save_external,
            Kind.UNLOAD_MODEL: self._unload,
        }

    def handle(self, request: TxRequest) -> RequestOutcome | Write:
        """Run a request. Return its outcome, or the rest of the work if files remain to be written.

        If it fails, the model is unchanged, except that a failed step drops the gradients.
        """
        try:
            handled = self._by_kind[request.kind](request)
        except Exception as error:  # noqa: BLE001 (becomes the outcome of the request)
            return self._failed_outcome(request, error)
        return handled if isinstance(handled, RequestOutcome) else partial(self._run_write, request, handled)

    def _run_write(self, request: TxRequest, write: Write) -> RequestOutcome:
        try:
            return write()
        except Exception as error:  # noqa: BLE001 (becomes the outcome of the request)
            return self._failed_outcome(request, error)

    def _failed_outcome(self, request: TxRequest, error: Exception) -> RequestOutcome:
        outcome = failed_outcome(request, error)
        if request.kind in CREATING and request.model_id not in self._backend.models():
            outcome.also = _set_status(request, ModelStatus.FAILED)
        return outcome

    # -- models

    def _create_model(self, request: TxRequest) -> RequestOutcome:
        body = CreateModelRequest.model_validate_json(request.payload)
        with reading(self._database) as session:
            lora = AdapterConfig(**session.get_one(Model, body.model_id).lora)
        with self._rollback(body.model_id, None):
            self._backend.create_model(body.model_id, lora)
        return _done_outcome(request, ModelCreated(model_id=body.model_id), _mark_ready(request))

    def _load_weights(self, request: TxRequest) -> RequestOutcome:
        body = LoadWeightsRequest.model_validate_json(request.payload)
        model_id = request.model_id
        assert model_id is not None
        assert request.request_id is not None
        folder = checkpoint_folder(self._config, body.path)
        if not folder.is_dir():
            raise UserError(f"there is no checkpoint {body.path}; it was deleted or has expired")
        before = self._backend.models().get(model_id)  # created by the previous request and not used since
        with self._rollback(model_id, before):
            self._backend.delete_model(model_id)
            self._backend.load_model(model_id, folder, with_optimizer=body.optimizer)
            self._points.write(model_id, request.request_id)  # the checkpoint may be deleted later
        lora = self._backend.models()[model_id]
        return _done_outcome(request, WeightsLoaded(model_id=model_id, path=body.path), _mark_ready(request, lora))

    @contextmanager
    def _rollback(self, model_id: str, before: AdapterConfig | None) -> Iterator[None]:
        """Restore a model's previous state if its creation fails: untrained or absent."""
        try:
            yield
        except BaseException:
            self._backend.delete_model(model_id)
            if before is not None:
                self._backend.create_model(model_id, before)
            raise

    def _optim_step(self, request: TxRequest) -> RequestOutcome:
        assert request.model_id is not None
        body = OptimStepRequest.model_validate_json(request.payload)
        try:
            self._check_passes(request)
            metrics = self._backend.optim_step(request.model_id, body.adam())
        except BaseException:
            self._backend.drop_gradients(request.model_id)
            raise
        return _done_outcome(request, OptimStepDone(metrics=metrics))

    def _check_passes(self, step: TxRequest) -> None:
        """Raise if a pass with gradients failed since the previous step.

        The client may have sent this step before it knew about the failure, and one call of the client may be several
        passes.
        """
        with reading(self._database) as session:
            failed = failed_passes(session, step)
        for pass_ in failed:
            if codec.message_from_bytes(pass_.payload).forward_only:
                continue
            raise (UserError if pass_.error_category == "user" else TinkerError)(
                f"the step was not applied, because forward_backward request {pass_.request_id} before it failed: "
                f"{pass_.error}. All gradients since the previous step were dropped; repeat the passes, then the step"
            )

    def _unload(self, request: TxRequest) -> RequestOutcome:
        assert request.model_id is not None
        self._backend.delete_model(request.model_id)
        self._points.delete(request.model_id)
        response = ModelUnloaded(model_id=request.model_id)
        return _done_outcome(request, response, _set_status(request, ModelStatus.UNLOADED))

    # -- folders

    def _save_weights(self, request: TxRequest) -> Write:
        body = SaveWeightsRequest.model_validate_json(request.payload)
        path = TinkerPath(body.model_id, CheckpointKind.TRAINING, body.path or str(request.request_id))
        checkpoint = self._checkpoint(path, body.ttl_seconds, body.user_metadata)
        response = WeightsSaved(path=str(path), type="save_weights")
        return self._save_checkpoint(request, checkpoint, response, overwrite=body.overwrite)

    def _save_for_sampler(self, request: TxRequest) -> Write:
        body = SaveWeightsForSamplerRequest.model_validate_json(request.payload)
        if body.path is not None:
            path = TinkerPath(body.model_id, CheckpointKind.SAMPLER, body.path)
            checkpoint = self._checkpoint(path, body.ttl_seconds, body.user_metadata)
            return self._save_checkpoint(
                request, checkpoint, WeightsSaved(path=str(path), type="save_weights_for_sampler")
            )
        assert body.sampling_session_id is not None
        assert body.sampling_session_seq_id is not None
        assert request.session_id is not None
        with reading(self._database) as session:
            is_saved = session.get(SamplingSession, body.sampling_session_id) is not None
            if is_saved or body.sampling_session_id in self._unfinished_snapshots:
                raise UserError(
                    f"sampling session {body.sampling_session_id} already exists; increment its number for each new one"
                )
        folder = snapshot_folder(self._config, body.sampling_session_id)
        save = capture(self._config, self._backend, body.model_id, with_optimizer=False)
        is_external = self._config.external_inference_url is not None  # that server samples from the folder
        weights = None if is_external else self._backend.weights_of(body.model_id)
        new = SamplingSession(
            sampling_session_id=body.sampling_session_id,
            session_id=request.session_id,
            seq_id=body.sampling_session_seq_id,
            base_model=self._backend.base_model.name,
            model_id=body.model_id,
        )
        response = SnapshotSaved(sampling_session_id=new.sampling_session_id)
        self._unfinished_snapshots.add(new.sampling_session_id)

        def also(session: Session) -> None:
            session.merge(new)
            self._unfinished_snapshots.discard(new.sampling_session_id)
            if not is_external:
                self._samplers.add(new.sampling_session_id, weights)

        def write() -> RequestOutcome:
            try:
                write_folder(folder, save)
            except BaseException:
                self._unfinished_snapshots.discard(new.sampling_session_id)
                raise
            return _done_outcome(request, response, also)

        return write

    def _save_external(self, request: TxRequest) -> Write:
        body = SaveWeightsExternalRequest.model_validate_json(request.payload)
        path = TinkerPath(body.model_id, CheckpointKind.EXTERNAL, body.path)
        checkpoint = self._checkpoint(path, body.ttl_seconds, None)
        return self._save_checkpoint(request, checkpoint, WeightsSaved(path=str(path), type="save_weights_external"))

    def _save_checkpoint(
        self, request: TxRequest, new: Checkpoint, response: WeightsSaved, *, overwrite: bool = False
    ) -> Write:
        """Capture the model. Return the function that writes the checkpoint's files. The outcome adds row and name."""
        with reading(self._database) as session:
            is_there = session.get(Checkpoint, (new.model_id, new.kind, new.name)) is not None
        if is_there and not overwrite:
            fix = ", or overwrite it" if new.kind is CheckpointKind.TRAINING else ""
            raise UserError(f"checkpoint {new.path} already exists; choose another name{fix}")
        folder = checkpoint_folder(self._config, new.path)
        with_optimizer = new.kind is CheckpointKind.TRAINING
        save = capture(self._config, self._backend, new.model_id, with_optimizer=with_optimizer)

        def write() -> RequestOutcome:
            complete = fill_folder(folder, save)
            new.size_bytes = sum(file.stat().st_size for file in complete.iterdir())
            reported = {"size_bytes": new.size_bytes} if new.kind is CheckpointKind.EXTERNAL else {}

            def also(session: Session) -> None:
                session.merge(new)
                session.flush()
                rename_into_place(complete, folder)

            return _done_outcome(request, response.model_copy(update=reported), also)

        return write

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


def _mark_ready(request: TxRequest, lora: AdapterConfig | None = None) -> Also:
    """Return the change that marks a model as ready, unless it was cancelled."""

    def also(session: Session) -> None:
        model = session.get_one(Model, request.model_id)
        if model.status is ModelStatus.PENDING:
            model.status = ModelStatus.READY
        if lora is not None:
            model.rank, model.lora = lora.rank, asdict(lora)

    return also


def _set_status(request: TxRequest, status: ModelStatus) -> Also:
    return lambda session: setattr(session.get_one(Model, request.model_id), "status", status)


def _done_outcome(request: TxRequest, response: ResponseBody, also: Also | None = None) -> RequestOutcome:
    assert request.request_id is not None
    return RequestOutcome(request.request_id, response.to_bytes(), also=also)
