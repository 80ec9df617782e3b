"""HTTP replies and the mapping from errors to replies."""

import json
import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tx.tinker.refusal import RefusalError
from tx.tinker.server.downloads import hide_token
from tx.tinker.types import UserError
from tx.tinker.wire.responses import ResponseBody

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
MAX_PROBLEMS = 5
DATABASE_BUSY_SEC = 2.0


def reply(body: ResponseBody, status: int = 200) -> Response:
    """Return a JSON reply."""
    return Response(body.to_bytes(), status, media_type="application/json")


def raw_reply(body: bytes, media_type: str = "application/json") -> Response:
    """Return a reply with serialized JSON or a serialized protobuf message."""
    return Response(body, media_type=media_type)


def refusal_reply(refusal: UserError) -> Response:
    """Return the reply for a rejected request. It always has a body: clients treat an empty body as a proxy error."""
    status = refusal.status if isinstance(refusal, RefusalError) else 400
    headers = {}
    if isinstance(refusal, RefusalError) and refusal.retry_after is not None:
        seconds = refusal.retry_after
        headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1000:.0f}"}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="skyrl-tx, any user, the API key as password"'
    return _message_reply(status, str(refusal), headers)


def _message_reply(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"detail": message}), status, headers, media_type="application/json")


def add_error_replies(app: FastAPI) -> None:
    """Register handlers that give every error a reply with a message."""
    app.add_exception_handler(UserError, _on_user_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DBAPIError, _on_database)
    app.add_exception_handler(Exception, _on_bug)


async def _on_user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return refusal_reply(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """Summarize validation errors without the body, since it may be large or binary."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()]
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return _message_reply(422, "; ".join(problems[:MAX_PROBLEMS]) + more)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _message_reply(404, f"there is no {request.method} {request.url.path[:200]} here")
    return _message_reply(error.status_code, str(error.detail), dict(error.headers or {}))


async def _on_database(request: Request, error: Exception) -> Response:
    """Report a lock timeout or an unavailable database with 503: clients retry."""
    logger.error("the database failed in %s %s: %s", request.method, hide_token(request.url.path), error)
    return _message_reply(
        503, "the database is busy or unavailable; try again", {"Retry-After": f"{DATABASE_BUSY_SEC:.0f}"}
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, hide_token(request.url.path), exc_info=error)
    return _message_reply(500, f"the server failed with {type(error).__name__}; its log has the details")
