"""For people and for Prometheus."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter, Response
from jinja2 import Environment, StrictUndefined, Template
from prometheus_client import CONTENT_TYPE_LATEST
from sqlmodel import Session
from starlette.responses import HTMLResponse

from tx.tinker import store
from tx.tinker.db_models import EngineState, Kind, now
from tx.tinker.service import Caller, is_alive
from tx.tinker.status import look, pending_by_kind

router = APIRouter()

TEMPLATE = Path(__file__).with_name("status.html.j2")


@lru_cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text("utf-8"))


@router.get("/")
async def status_page(call: Caller) -> Response:
    """What the server does; it looks again by itself."""
    service = call.service
    seen = await service.read(look)
    page = _template().render(
        config=service.config,
        status=seen,
        is_engine_up=is_alive(seen.engine),
        failure=service.failure,
        n_starts=0 if service.supervisor is None else service.supervisor.n_starts,
        n_waiting=service.promises.n_waiting,
        started_at=service.started_at,
        now=now(),
    )
    return HTMLResponse(page)


@router.get("/metrics")
async def metrics(call: Caller) -> Response:
    """For Prometheus."""

    def ask(db: Session) -> tuple[dict[Kind, int], EngineState | None]:
        return pending_by_kind(db), store.engine_state(db)

    service = call.service
    pending, state = await service.read(ask)
    counts = {} if state is None else state.status
    text = service.metrics.to_text(pending, service.promises.n_waiting, counts, is_engine_up=is_alive(state))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
