"""The status page and the Prometheus endpoint."""

from datetime import timedelta
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, Response
from jinja2 import Environment, StrictUndefined, Template
from prometheus_client import CONTENT_TYPE_LATEST
from sqlmodel import Session
from starlette.responses import HTMLResponse

from tx.tinker.db_models import EngineState, Kind, now
from tx.tinker.server.service import Caller, is_alive
from tx.tinker.server.status import pending_by_kind, query_status
from tx.tinker.server.throughput import polyline
from tx.tinker.store import queries

router = APIRouter()

TEMPLATE = Path(__file__).with_name("status.html.j2")
VERSION = version("skyrl-tx")


def format_duration(time: timedelta) -> str:
    """Format a duration in its two largest units, e.g. `2 h 5 min`."""
    left = max(0, int(time.total_seconds()))
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        n, left = divmod(left, size)
        if n or (name == "s" and not parts):
            parts.append(f"{n} {name}")
    return " ".join(parts[:2])


@lru_cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["format_duration"] = format_duration
    environment.filters["polyline"] = polyline
    return environment.from_string(TEMPLATE.read_text("utf-8"))


@router.get("/")
async def status_page(call: Caller) -> Response:
    """Show the status page. It refreshes itself. If the server has API keys, users see only their own objects."""
    service = call.service
    owner = call.owner if service.config.api_keys else None
    seen = await service.read(partial(query_status, base_model=service.config.model_name, owner=owner))
    page = _template().render(
        config=service.config,
        version=VERSION,
        status=seen,
        counts=service.counts(seen.engine),
        seconds_seen=timedelta(seconds=service.throughput.seconds),
        rates={name: service.throughput.rates(name) for name in ("tokens_trained", "tokens_sampled")},
        is_engine_up=is_alive(seen.engine) and (service.supervisor is None or service.supervisor.is_running),
        failure=service.failure,
        n_starts=0 if service.supervisor is None else service.supervisor.n_starts,
        n_waiting=service.promises.n_waiting,
        started_at=service.started_at,
        now=now(),
    )
    return HTMLResponse(page)


@router.get("/metrics")
async def metrics(call: Caller) -> Response:
    """Return the metrics for Prometheus."""

    service = call.service

    def query(db: Session) -> tuple[dict[Kind, int], int, EngineState | None]:
        return pending_by_kind(db), queries.n_models(db, service.config.model_name), service.engine_state(db)

    pending, n_models, state = await service.read(query)
    counts = service.counts(state)
    n_waiting = service.promises.n_waiting
    text = service.metrics.to_text(pending, n_waiting, n_models, counts, is_engine_up=is_alive(state))
    return Response(text, media_type=CONTENT_TYPE_LATEST)
