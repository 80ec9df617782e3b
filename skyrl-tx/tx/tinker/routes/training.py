"""Models under training. All endpoints except `get_info` queue a request for the engine and return a promise."""

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from tx.tinker.db_models import EngineState, Kind
from tx.tinker.refusal import RefusalError
from tx.tinker.server.replies import PROTOBUF, reply
from tx.tinker.server.service import Call, Caller
from tx.tinker.store import queries
from tx.tinker.submission import training as submission
from tx.tinker.submission.images import SubmittedImages
from tx.tinker.submission.training import Submission
from tx.tinker.submission.validation import check_pass
from tx.tinker.types import Pass, UserError
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses
from tx.tinker.wire.tinker_pb2 import ForwardBackwardRequest as ForwardBackwardMessage

router = APIRouter()

Accept = Callable[[Submission], int]
JSON = "application/json"
PASS_BODY = {"requestBody": {"content": {JSON: {"schema": wire.ForwardBackwardRequest.model_json_schema()}}}}


async def _promise(call: Call, kind: Kind, accept: Accept, model_id: str | None) -> Response:
    if call.service.failure is not None:
        raise RefusalError(503, call.service.failure, retry_after=10)
    request_id = await call.submit(accept, is_durable=True)
    call.service.metrics.accepted.labels(kind).inc()
    call.add_notes(model=model_id, request=request_id)
    return reply(responses.Promise(request_id=str(request_id)))


@router.post("/create_model")
async def create_model(call: Caller, body: wire.CreateModelRequest) -> Response:
    """Create a model."""
    model_id = queries.model_id_of(body.session_id, body.model_seq_id)
    return await _promise(call, Kind.CREATE_MODEL, lambda to: submission.create_model(to, body), model_id)


@router.post("/load_weights")
async def load_weights(call: Caller, body: wire.LoadWeightsRequest) -> Response:
    """Load a checkpoint into a new model, or into a model that was just created."""
    model_id = body.model_id
    if body.session_id is not None and body.model_seq_id is not None:
        model_id = queries.model_id_of(body.session_id, body.model_seq_id)
    return await _promise(call, Kind.LOAD_WEIGHTS, lambda to: submission.load_weights(to, body), model_id)


@router.post("/unload_model")
async def unload_model(call: Caller, body: wire.ModelRequest) -> Response:
    """Unload a model."""
    return await _promise(call, Kind.UNLOAD_MODEL, lambda to: submission.unload_model(to, body), body.model_id)


@router.post("/optim_step")
async def optim_step(call: Caller, body: wire.OptimStepRequest) -> Response:
    """Apply the accumulated gradients."""
    return await _promise(call, Kind.OPTIM_STEP, lambda to: submission.optim_step(to, body), body.model_id)


@router.post("/save_weights")
async def save_weights(call: Caller, body: wire.SaveWeightsRequest) -> Response:
    """Save a training checkpoint."""
    return await _promise(call, Kind.SAVE_WEIGHTS, lambda to: submission.save_weights(to, body), body.model_id)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(call: Caller, body: wire.SaveWeightsForSamplerRequest) -> Response:
    """Save weights to sample from."""
    kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    return await _promise(call, kind, lambda to: submission.save_weights_for_sampler(to, body), body.model_id)


@router.post("/save_weights_external")
async def save_weights_external(call: Caller, body: wire.SaveWeightsExternalRequest) -> Response:
    """Save weights for other programs."""
    kind = Kind.SAVE_WEIGHTS_EXTERNAL
    return await _promise(call, kind, lambda to: submission.save_weights_external(to, body), body.model_id)


@router.post("/forward_backward", openapi_extra=PASS_BODY)
async def forward_backward(call: Caller, request: Request) -> Response:
    """Run a pass, in protobuf or in older clients' JSON."""
    return await _pass(call, request, is_forward_only=False)


@router.post("/forward", openapi_extra=PASS_BODY)
async def forward(call: Caller, request: Request) -> Response:
    """Run a pass without gradients, for older clients."""
    return await _pass(call, request, is_forward_only=True)


async def _pass(call: Call, request: Request, *, is_forward_only: bool) -> Response:
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise RefusalError(415, f"Content-Type {kind[:50]!r} is not supported; send {PROTOBUF} or {JSON}")
    read: Callable[[bytes], ForwardBackwardMessage]
    read = codec.message_from_bytes if kind == PROTOBUF else partial(_from_json, is_forward_only)
    state = await call.service.read(call.service.engine_state)
    images = SubmittedImages(call.service.config)
    head, pass_ = await call.service.compute(partial(_read_pass, read, body, is_forward_only, state, images))

    def accept(to: Submission) -> int:
        if isinstance(pass_, UserError):
            return submission.add_failed_pass(to, head, pass_)
        return submission.forward_backward(to, pass_, head.seq_id, head.original)

    response = await _promise(call, Kind.FORWARD_BACKWARD, accept, head.model_id)
    if not isinstance(pass_, UserError):
        call.service.metrics.tokens.labels("passes").inc(sum(len(datum.tokens) for datum in pass_.data))
    return response


def _from_json(is_forward_only: bool, body: bytes) -> ForwardBackwardMessage:
    try:
        request = wire.ForwardBackwardRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        reason = f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        raise RefusalError(422, f"the body is not a valid forward_backward request: {reason}") from error
    data = request.forward_backward_input.model_dump(exclude_none=True)
    return codec.message_from_json(request.model_id, request.seq_id, data, is_forward_only=is_forward_only)


def _read_pass(
    read: Callable[[bytes], ForwardBackwardMessage],
    body: bytes,
    is_forward_only: bool,
    state: EngineState | None,
    images: SubmittedImages,
) -> tuple[submission.PassHead, Pass | UserError]:
    """Parse a pass. Return its head, and either the pass or the error in its data."""
    try:
        message = read(body)
    except RefusalError:
        raise
    except UserError as error:
        raise RefusalError(422, str(error)) from error
    if is_forward_only:
        message.forward_only = True
    original = message.SerializeToString(deterministic=True)
    names = ("model_id", "seq_id", "loss_fn", "forward_only")
    payload = ForwardBackwardMessage(**{name: getattr(message, name) for name in names}).SerializeToString()
    head = submission.PassHead(message.model_id, message.seq_id or None, payload, original)
    try:
        pass_ = codec.pass_of(message, images.read)
        if images.has_all_lengths:
            check_pass(pass_, state)
    except UserError as error:
        return head, error
    return head, pass_


@router.post("/get_info")
async def get_info(call: Caller, body: wire.ModelRequest) -> Response:
    """Describe a model."""
    call.add_notes(model=body.model_id)
    model = await call.read(lambda db, owner: queries.find_model(db, body.model_id, owner))
    tokenizer = call.service.config.tokenizer
    info = responses.ModelInfo(
        model_id=model.model_id,
        model_data=responses.ModelData(model_name=model.base_model, tokenizer_id=tokenizer),
        model_name=model.base_model,
        is_lora=model.rank > 0,
        lora_rank=model.rank or None,
    )
    return reply(info)
