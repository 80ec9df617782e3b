import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

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


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics()


@pytest.fixture
def client(metrics: ServerMetrics) -> Iterator[httpx.AsyncClient]:
    things = Route("/things/{name}", answer, methods=["GET", "POST", "BREW"])
    app = Starlette(routes=[things, Route("/stream", stream)])
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


async def test_a_request_that_a_shutdown_cancels_is_sent_again_later(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tx.tinker.server.request_log")
    WAITING.append(asyncio.Event())
    request = asyncio.create_task(client.get("/things/wait"))
    await WAITING[-1].wait()
    request.cancel()
    answered = await request
    assert (answered.status_code, answered.headers["Retry-After"]) == (503, "10")
    assert "the server is stopping" in answered.json()["detail"]
    assert "GET /things/wait 503" in caplog.text


async def test_a_reply_that_has_begun_is_cut_off_by_a_shutdown(client: httpx.AsyncClient) -> None:
    WAITING.append(asyncio.Event())
    request = asyncio.create_task(client.get("/stream"))
    await WAITING[-1].wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
