import asyncio

import httpx
import pytest

from skyrl_agent.harness.gateway import MAX_CONNECTIONS, MAX_RETRIES, Gateway

POST = b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


def url(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/session/a/v1"


async def test_an_agent_cannot_pass_all_its_turns_off_as_retries() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    statuses = []
    async with server, Gateway(url(server), max_turns=2, path=None) as gateway, httpx.AsyncClient() as client:
        while not gateway.turn_limit.is_set() and len(statuses) < 100:
            retry = {"x-stainless-retry-count": "1"} if statuses else {}
            reply = await client.post(f"{gateway.origin}/v1/chat/completions", headers=retry)
            statuses.append(reply.status_code)
    assert statuses == [200] * (2 + 2 * MAX_RETRIES) + [400]
    assert gateway.n_turns == 2


@pytest.mark.parametrize(
    "head",
    [
        POST.replace(b"completions", b"complet%69ons"),
        POST.replace(b"/v1/", b"/v1/../../b/v1/"),
        b"GET /v1/models HTTP/1.1\r\nHost: a\n\n"
        + POST.replace(b"/v1/", b"/session/b/v1/"),  # two requests to some servers
    ],
)
async def test_a_request_cannot_hide_a_turn_or_another_session(head: bytes) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Gateway(url(server), max_turns=2, path=None) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.origin.rpartition(":")[2]))
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        writer.close()


async def test_idle_connections_are_limited() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, Gateway(url(server), max_turns=2, path=None) as gateway:
        port = int(gateway.origin.rpartition(":")[2])
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS + 1)]
        assert await asyncio.wait_for(opened[-1][0].read(), 5) == b""
        for _, writer in opened:
            writer.close()
