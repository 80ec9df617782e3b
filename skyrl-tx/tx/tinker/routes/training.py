"""Models under training: everything here but `get_info` is a request for the engine, answered with a promise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import ValidationError
from sqlmodel import Session

from tx.tinker import store, submission
from tx.tinker.db_models import EngineState, Kind
from tx.tinker.refusal import Refusal
from tx.tinker.replies import PROTOBUF, reply
from tx.tinker.service import Call, Caller
from tx.tinker.submission import Submission
from tx.tinker.types import Pass, UserError
from tx.tinker.validation import check_pass
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as answers
from tx.tinker.wire.tinker_pb2 import ForwardBackwardRequest as ForwardBackwardMessage

router = APIRouter()

Accept = Callable[[Submission], int]
JSON = "application/json"
PASS_BODY = {"requestBody": {"content": {JSON: {"schema": wire.ForwardBackwardRequest.model_json_schema()}}}}


async def _promise(call: Call, kind: Kind, accept: Accept, model_id: str | None) -> Response:
    if call.service.failure is not None:
        raise Refusal(503, call.service.failure, retry_after=10)
    request_id = await call.submit(accept)
    call.service.metrics.accepted.labels(kind).inc()
    call.note(model=model_id, request=request_id)
    return reply(answers.Promise(request_id=str(request_id)))


@router.post("/create_model")
async def create_model(call: Caller, asked: wire.CreateModelRequest) -> Response:
    """A new model."""
    model_id = store.model_id_of(asked.session_id, asked.model_seq_id)
    return await _promise(call, Kind.CREATE_MODEL, lambda to: submission.create_model(to, asked), model_id)


@router.post("/load_weights")
async def load_weights(call: Caller, asked: wire.LoadWeightsRequest) -> Response:
    """A checkpoint into a new model, or one that was just created."""
    model_id = asked.model_id
    if asked.session_id is not None and asked.model_seq_id is not None:
        model_id = store.model_id_of(asked.session_id, asked.model_seq_id)
    return await _promise(call, Kind.LOAD_WEIGHTS, lambda to: submission.load_weights(to, asked), model_id)


@router.post("/unload_model")
async def unload_model(call: Caller, asked: wire.ModelRequest) -> Response:
    """Forget a model."""
    return await _promise(call, Kind.UNLOAD_MODEL, lambda to: submission.unload_model(to, asked), asked.model_id)


@router.post("/optim_step")
async def optim_step(call: Caller, asked: wire.OptimStepRequest) -> Response:
    """A step with the gradients so far."""
    return await _promise(call, Kind.OPTIM_STEP, lambda to: submission.optim_step(to, asked), asked.model_id)


@router.post("/save_weights")
async def save_weights(call: Caller, asked: wire.SaveWeightsRequest) -> Response:
    """A checkpoint to go on from."""
    return await _promise(call, Kind.SAVE_WEIGHTS, lambda to: submission.save_weights(to, asked), asked.model_id)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(call: Caller, asked: wire.SaveWeightsForSamplerRequest) -> Response:
    """Weights to sample from."""
    kind = Kind.SAVE_WEIGHTS_FOR_SAMPLER
    return await _promise(call, kind, lambda to: submission.save_weights_for_sampler(to, asked), asked.model_id)


@router.post("/save_weights_external")
async def save_weights_external(call: Caller, asked: wire.SaveWeightsExternalRequest) -> Response:
    """Weights for other programs."""
    kind = Kind.SAVE_WEIGHTS_EXTERNAL
    return await _promise(call, kind, lambda to: submission.save_weights_external(to, asked), asked.model_id)


@router.post("/forward_backward", openapi_extra=PASS_BODY)
async def forward_backward(call: Caller, request: Request) -> Response:
    """A pass, in protobuf, or in the JSON of older clients."""
    return await _pass(call, request, is_forward_only=False)


@router.post("/forward", openapi_extra=PASS_BODY)
async def forward(call: Caller, request: Request) -> Response:
    """A pass of older clients that leaves no gradients."""
    return await _pass(call, request, is_forward_only=True)


async def _pass(call: Call, request: Request, *, is_forward_only: bool) -> Response:
    body = await request.body()
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise Refusal(415, f"Content-Type {kind[:50]!r} is not understood; send {PROTOBUF} or {JSON}")
    read: Callable[[bytes], ForwardBackwardMessage]
    read = codec.message_from_bytes if kind == PROTOBUF else partial(_from_json, is_forward_only)
    state = await call.service.read(call.service.engine_state)
    message, asked, payload = await call.service.compute(partial(_read_pass, read, body, is_forward_only, state))

    def accept(to: Submission) -> int:
        return submission.forward_backward(to, asked, message.seq_id or None, payload)

    answer = await _promise(call, Kind.FORWARD_BACKWARD, accept, asked.model_id)
    call.service.metrics.tokens.labels("passes").inc(sum(len(datum.tokens) for datum in asked.data))
    return answer


def _from_json(is_forward_only: bool, body: bytes) -> ForwardBackwardMessage:
    try:
        asked = wire.ForwardBackwardRequest.model_validate_json(body)
    except ValidationError as error:
        raise Refusal(422, f"the body is no forward_backward: {_first(error)}") from error
    told = asked.forward_backward_input.model_dump(exclude_none=True)
    return codec.message_from_json(asked.model_id, asked.seq_id, told, is_forward_only=is_forward_only)


def _first(error: ValidationError) -> str:
    one = error.errors(include_input=False)[0]
    return f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"


def _read_pass(
    read: Callable[[bytes], ForwardBackwardMessage], body: bytes, is_forward_only: bool, state: EngineState | None
) -> tuple[ForwardBackwardMessage, Pass, bytes]:
    """The message, what it asks for, and its bytes, which are always the same, so that a repetition is known."""
    try:
        message = read(body)
    except Refusal:
        raise
    except UserError as error:
        raise Refusal(422, str(error)) from error
    if is_forward_only:
        message.forward_only = True
    asked = codec.pass_of(message)
    check_pass(asked, state)
    return message, asked, message.SerializeToString(deterministic=True)


@router.post("/get_info")
async def get_info(call: Caller, asked: wire.ModelRequest) -> Response:
    """What a model is."""
    call.note(model=asked.model_id)

    def describe(db: Session, owner: str) -> answers.ModelInfo:
        model = store.find_model(db, asked.model_id, owner)
        tokenizer = call.service.config.tokenizer
        return answers.ModelInfo(
            model_id=model.model_id,
            model_data=answers.ModelData(model_name=model.base_model, tokenizer_id=tokenizer),
            model_name=model.base_model,
            is_lora=model.rank > 0,
            lora_rank=model.rank or None,
        )

    return reply(await call.read(describe))
