"""Replies, and what errors become of them."""

from __future__ import annotations

import json
import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tx.tinker.refusal import Refusal
from tx.tinker.types import UserError
from tx.tinker.wire.responses import Answer

logger = logging.getLogger(__name__)

PROTOBUF = "application/x-protobuf"
MOST_PROBLEMS = 5
DATABASE_BUSY_SEC = 2.0


def reply(answer: Answer, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(answer.to_bytes(), status, media_type="application/json")


def json_reply(body: bytes) -> Response:
    """JSON that is written already."""
    return Response(body, media_type="application/json")


def protobuf_reply(body: bytes) -> Response:
    """A message that is written already."""
    return Response(body, media_type=PROTOBUF)


def refusal_reply(refusal: UserError) -> Response:
    """Words are always there: clients take an empty body for a fault of a proxy."""
    status = refusal.status if isinstance(refusal, Refusal) else 400
    headers = {}
    if isinstance(refusal, Refusal) and refusal.retry_after is not None:
        seconds = refusal.retry_after
        headers = {"Retry-After": str(math.ceil(seconds)), "retry-after-ms": f"{seconds * 1000:.0f}"}
    if status == 401:
        headers["WWW-Authenticate"] = 'Basic realm="skyrl-tx, any user, the API key as password"'
    return _words(status, str(refusal), headers)


def _words(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"detail": message}), status, headers, media_type="application/json")


def add_error_replies(app: FastAPI) -> None:
    """Every error has a reply that says what is wrong."""
    app.add_exception_handler(UserError, _on_user_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(DBAPIError, _on_database)
    app.add_exception_handler(Exception, _on_bug)


async def _on_user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return refusal_reply(error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    """In words, and without the body, which may be large, or no text at all."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}" for one in error.errors()]
    more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
    return _words(422, "; ".join(problems[:MOST_PROBLEMS]) + more)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _words(404, f"there is no {request.method} {request.url.path[:200]} here")
    return _words(error.status_code, str(error.detail), dict(error.headers or {}))


async def _on_database(request: Request, error: Exception) -> Response:
    """A lock that was held for too long, or a database that is away: clients come again."""
    logger.error("the database failed in %s %s: %s", request.method, request.url.path, error)
    return _words(503, "the database is busy or away; try again", {"Retry-After": f"{DATABASE_BUSY_SEC:.0f}"})


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _words(500, f"the server made a mistake, {type(error).__name__}; its log says more")
