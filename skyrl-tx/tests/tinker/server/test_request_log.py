import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tx.tinker.server.metrics import ServerMetrics
from tx.tinker.server.request_log import RequestLog

WAITING: list[asyncio.Event] = []


async def stream(request: Request) -> Response:
    async def parts() -> AsyncIterator[str]:
        yield "begun"
        WAITING[-1].set()
        await asyncio.Event().wait()

    return StreamingResponse(parts())


async def answer(request: Request) -> Response:
    request.scope["tx.notes"] |= {"session": "s\nERROR forged", "request": "7", "nonsense": "never"}
    match request.path_params["name"]:
        case "fail":
            raise ZeroDivisionError
        case "wait":
            WAITING[-1].set()
            await asyncio.Event().wait()
    return PlainTextResponse("ok", 201)


LOG = "tx.tinker.server.request_log"


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics()


@pytest.fixture
def client(metrics: ServerMetrics, caplog: pytest.LogCaptureFixture) -> httpx.AsyncClient:
    caplog.set_level(logging.INFO, LOG)
    things = Route("/things/{name}", answer, methods=["GET", "POST", "BREW"])
    app = Starlette(routes=[things, Route("/stream", stream)])
    app.add_middleware(RequestLog, metrics=metrics)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://x")


async def test_one_line_per_request(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens of downloads are hidden, also in addresses that lead nowhere."""
    await client.get("/things/a%0Ab")
    await client.get("/api/v1/downloads/cGF5bG9hZA.5iGnAtUrE/weights.bin")
    await client.get("/api/v1/downloads/cGF5bG9hZA.5iGnAtUrE")
    line, *downloads = [one.getMessage() for one in caplog.records if one.name == LOG]
    assert line.startswith(r"GET /things/a\nb 201 ")
    assert line.endswith(r"ms session=s\nERROR forged request=7")
    paths = [line.split()[1] for line in downloads]
    assert paths == ["/api/v1/downloads/[hidden]/weights.bin", "/api/v1/downloads/[hidden]"]


async def test_metrics_are_grouped_by_endpoint(client: httpx.AsyncClient, metrics: ServerMetrics) -> None:
    for name in ("a", "b", "fail"):
        await client.get(f"/things/{name}")
    for number in range(3):
        await client.get(f"/elsewhere/{number}")
        await client.request(f"BREW{number}", "/things/a")
    await client.request("BREW", "/things/a")
    families = text_string_to_metric_families(metrics.to_text({}, 0, 0, {}, is_engine_up=False).decode())
    (family,) = (one for one in families if one.name == "tx_http_requests")
    found = {tuple(one.labels.values()): one.value for one in family.samples if one.name.endswith("_total")}
    assert found == {
        ("/things/{name}", "GET", "201"): 2,
        ("/things/{name}", "GET", "500"): 1,
        ("/things/{name}", "other", "201"): 1,
        ("/things/{name}", "other", "405"): 3,
        ("other", "GET", "404"): 3,
    }


async def cancel_on_shutdown(client: httpx.AsyncClient, path: str) -> httpx.Response:
    """Cancel a request once it is being answered, as uvicorn does when it stops."""
    WAITING.append(asyncio.Event())
    request = asyncio.create_task(client.get(path))
    await WAITING[-1].wait()
    request.cancel()
    return await request


async def test_a_shutdown_cancels_requests(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Clients send them again later. A reply that has begun is cut off."""
    answered = await cancel_on_shutdown(client, "/things/wait")
    assert (answered.status_code, answered.headers["Retry-After"]) == (503, "10")
    assert "the server is stopping" in answered.json()["detail"]
    assert "GET /things/wait 503" in caplog.text
    with pytest.raises(asyncio.CancelledError):
        await cancel_on_shutdown(client, "/stream")
