import asyncio

import httpx

from skyrl_agent.harness.gateway import MAX_RETRIES, Gateway


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def test_an_agent_cannot_pass_all_its_turns_off_as_retries() -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/session/a/v1"
    statuses = []
    async with server, Gateway(url, max_turns=2, path=None) as gateway, httpx.AsyncClient() as client:
        while not gateway.turn_limit.is_set() and len(statuses) < 100:
            retry = {"x-stainless-retry-count": "1"} if statuses else {}
            reply = await client.post(f"{gateway.origin}/v1/chat/completions", headers=retry)
            statuses.append(reply.status_code)
    assert statuses == [200] * (2 + 2 * MAX_RETRIES) + [400]
    assert gateway.n_turns == 2
