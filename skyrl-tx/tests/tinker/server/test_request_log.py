from __future__ import annotations

import logging
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tx.tinker.server.metrics import ServerMetrics
from tx.tinker.server.request_log import RequestLog


async def answer(request: Request) -> Response:
    request.scope["tx.notes"] |= {"session": "s\nERROR forged", "request": "7", "nonsense": "never"}
    if request.path_params["name"] == "fail":
        raise ZeroDivisionError
    return PlainTextResponse("ok", 201)


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics()


@pytest.fixture
def client(metrics: ServerMetrics) -> Iterator[httpx.AsyncClient]:
    app = Starlette(routes=[Route("/things/{name}", answer, methods=["GET", "POST", "BREW"])])
    app.add_middleware(RequestLog, metrics=metrics)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://x")  # type: ignore[return-value]


async def test_one_line_per_request(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tx.tinker.server.request_log")
    await client.get("/things/a%0Ab")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tx.tinker.server.request_log"]
    assert line.startswith(r"GET /things/a\nb 201 ")
    assert line.endswith(r"ms session=s\nERROR forged request=7")


async def test_tokens_of_downloads_are_hidden(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Also in addresses that lead nowhere."""
    caplog.set_level(logging.INFO, "tx.tinker.server.request_log")
    await client.get("/api/v1/downloads/cGF5bG9hZA.5iGnAtUrE/weights.bin")
    await client.get("/api/v1/downloads/cGF5bG9hZA.5iGnAtUrE")
    lines = [one.getMessage() for one in caplog.records if one.name == "tx.tinker.server.request_log"]
    assert [line.split()[1] for line in lines] == [
        "/api/v1/downloads/[hidden]/weights.bin",
        "/api/v1/downloads/[hidden]",
    ]


async def test_metrics_are_grouped_by_endpoint(client: httpx.AsyncClient, metrics: ServerMetrics) -> None:
    for name in ("a", "b", "fail"):
        await client.get(f"/things/{name}")
    for number in range(3):
        await client.get(f"/elsewhere/{number}")
        await client.request(f"BREW{number}", "/things/a")
    await client.request("BREW", "/things/a")
    (family,) = [
        one
        for one in text_string_to_metric_families(metrics.to_text({}, 0, 0, {}, is_engine_up=False).decode())
        if one.name == "tx_http_requests"
    ]
    found = {tuple(one.labels.values()): one.value for one in family.samples if one.name.endswith("_total")}
    assert found == {
        ("/things/{name}", "GET", "201"): 2,
        ("/things/{name}", "GET", "500"): 1,
        ("/things/{name}", "other", "201"): 1,
        ("/things/{name}", "other", "405"): 3,
        ("other", "GET", "404"): 3,
    }
