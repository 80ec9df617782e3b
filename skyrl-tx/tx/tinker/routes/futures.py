"""Results. A poll is held until the result exists or the hold time is over."""

import time
from functools import partial

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker.db_models import Kind, RequestStatus, TxRequest
from tx.tinker.refusal import refuse
from tx.tinker.server.replies import PROTOBUF, raw_reply, reply
from tx.tinker.server.service import Call, Caller, Service
from tx.tinker.store import queries
from tx.tinker.wire import codec
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses

router = APIRouter()


@router.post("/retrieve_future")
async def retrieve_future(call: Caller, body: wire.RetrieveFutureRequest) -> Response:
    """Return the result, its error, or `try_again`."""
    request_id = queries.request_number(body.request_id)
    deadline = time.monotonic() + call.service.config.hold_sec

    def query(db: Session, owner: str) -> tuple[TxRequest, TxRequest | None]:
        return queries.find_request(db, request_id, owner), queries.finished_request(db, request_id)

    found, request = await call.read(query)
    call.add_notes(session=found.session_id, model=found.model_id, request=request_id)
    if request is None:
        request = await _wait(call.service, request_id, deadline)
    if request is None:
        served = call.service.config.model_name
        reason = await call.read(lambda db, _: queries.waiting_reason(db, found.model_id, served))
        return reply(_pending_reply(call.service, request_id, reason))
    call.service.metrics.count_finished(request)
    return await _result(call, request)


async def _wait(service: Service, request_id: int, deadline: float) -> TxRequest | None:
    """Wait for a request to finish. Return None if the client should poll again."""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or service.promises.is_released or service.failure is not None:
            return None
        await service.promises.wait(request_id, left)
        request = await service.read(lambda db: queries.finished_request(db, request_id))
        if request is not None:
            return request


def _pending_reply(service: Service, request_id: int, waiting_reason: str | None) -> responses.ResponseBody:
    if service.failure is not None:
        return responses.Failure(error=service.failure, category="server")
    reason = waiting_reason
    if reason is None and service.supervisor is not None and not service.supervisor.is_running:
        reason = "the engine died and is restarting; nothing is lost"
    if reason is None:
        return responses.TryAgain(request_id=str(request_id))
    return responses.TryAgain(request_id=str(request_id), queue_state="paused_capacity", queue_state_reason=reason)


async def _result(call: Call, request: TxRequest) -> Response:
    if request.status is RequestStatus.CANCELLED:
        return reply(responses.Failure(error="the request was cancelled", category="user"))
    if request.status is RequestStatus.FAILED:
        category: responses.Category = "user" if request.error_category == "user" else "server"
        return reply(responses.Failure(error=request.error or "unknown", category=category))
    assert request.result is not None
    if not request.is_result_protobuf:
        return raw_reply(request.result)
    if PROTOBUF in call.http.headers.get("accept", ""):
        return raw_reply(request.result, PROTOBUF)
    to_json = codec.sample_json if request.kind is Kind.SAMPLE else codec.forward_backward_json
    return raw_reply(await call.service.compute(partial(to_json, request.result)))


@router.post("/cancel_future")
async def cancel_future(call: Caller, body: wire.CancelFutureRequest) -> Response:
    """Cancel a sample."""
    request_id = queries.request_number(body.request_id)

    def cancel(db: Session, owner: str) -> None:
        if queries.find_request(db, request_id, owner).kind is not Kind.SAMPLE:
            refuse(f"request {request_id} is not a sample; requests that change a model cannot be cancelled")
        queries.cancel_sample(db, request_id)

    await call.write(cancel)
    call.add_notes(request=request_id)
    call.service.wake()
    call.service.promises.wake()
    return reply(responses.Empty())
