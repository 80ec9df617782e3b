"""Results: a client asks, and is held until there is one, or for so long that it had better ask again."""

from __future__ import annotations

import time
from functools import partial

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker import store
from tx.tinker.db_models import Kind, Request, RequestStatus
from tx.tinker.refusal import Refusal
from tx.tinker.replies import PROTOBUF, json_reply, protobuf_reply, reply
from tx.tinker.service import Call, Caller, Service
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as answers

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(call: Caller, asked: wire.RetrieveFutureRequest) -> Response:
    """The result, or its error, or `try_again`."""
    request_id = store.request_number(asked.request_id)
    deadline = time.monotonic() + call.service.config.hold_sec

    def ask(db: Session, owner: str) -> tuple[Request, Request | None]:
        return store.find_request(db, request_id, owner), store.finished_request(db, request_id)

    found, request = await call.read(ask)
    call.note(session=found.session_id, model=found.model_id, request=request_id)
    if request is None:
        request = await _wait(call.service, request_id, deadline)
    if request is None:
        served = call.service.config.model_name
        reason = await call.read(lambda db, _: store.why_not_here(db, found.model_id, served))
        return reply(_not_yet(call.service, request_id, reason))
    call.service.metrics.note_finished(request)
    return await _result(call, request)


async def _wait(service: Service, request_id: int, deadline: float) -> Request | None:
    """A request that is done; None when it is time to let the client go."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or service.promises.is_released or service.failure is not None:
            return None
        await service.promises.wait(request_id, left)
        request = await service.read(lambda db: store.finished_request(db, request_id))
        if request is not None:
            return request


def _not_yet(service: Service, request_id: int, why_not_here: str | None) -> answers.Answer:
    if service.failure is not None:
        return answers.Failure(error=service.failure, category="server")
    if why_not_here is not None:
        return _paused(request_id, why_not_here)
    if service.supervisor is not None and not service.supervisor.is_running:
        return _paused(request_id, "the engine has died and is started again; nothing is lost")
    return answers.TryAgain(request_id=str(request_id))


def _paused(request_id: int, reason: str) -> answers.Answer:
    return answers.TryAgain(request_id=str(request_id), queue_state="paused_capacity", queue_state_reason=reason)


async def _result(call: Call, request: Request) -> Response:
    if request.status is RequestStatus.CANCELLED:
        return reply(answers.Failure(error="the request was cancelled", category="user"))
    if request.status is RequestStatus.FAILED:
        return reply(answers.Failure(error=request.error or "unknown", category=_category(request.error_category)))
    assert request.result is not None
    if not request.is_result_protobuf:
        return json_reply(request.result)
    if PROTOBUF in call.http.headers.get("accept", ""):
        return protobuf_reply(request.result)
    to_json = codec.sample_json if request.kind is Kind.SAMPLE else codec.forward_backward_json
    return json_reply(await call.service.compute(partial(to_json, request.result)))


def _category(told: str | None) -> answers.Category:
    return "user" if told == "user" else "server" if told == "server" else "unknown"


@router.post("/cancel_future")
async def cancel_future(call: Caller, asked: wire.CancelFutureRequest) -> Response:
    """A sample is not wanted any more."""
    request_id = store.request_number(asked.request_id)

    def cancel(db: Session, owner: str) -> None:
        if store.find_request(db, request_id, owner).kind is not Kind.SAMPLE:
            raise Refusal(400, f"request {request_id} is no sample, and what changes a model is not cancelled")
        store.cancel_sample(db, request_id)

    await call.write(cancel)
    call.note(request=request_id)
    call.service.ring()
    call.service.promises.ring()
    return reply(answers.Empty())
