import asyncio
from collections.abc import Iterator

import pytest
from gym_kit.openenv_server import ProtocolServer
from gym_kit.processes import no_leaks, wait_for_no_tasks, wait_until_async

from skyrl_gym.adapters.openenv import slots
from skyrl_gym.adapters.openenv.client import CapacityReached, OpenEnvSession, SessionOptions, http_url, websocket_url


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    with ProtocolServer() as server:
        yield server


async def play(url: str, options: SessionOptions | None = None, pause_s: float = 0.01) -> None:
    async with OpenEnvSession(url, options) as session:
        await session.reset()
        await asyncio.sleep(pause_s)
        await session.step({"message": "hello"})


@pytest.mark.parametrize(
    ("url", "websocket", "http"),
    [
        ("http://host:8000", "ws://host:8000/ws", "http://host:8000/schema"),
        ("https://host/", "wss://host/ws", "https://host/schema"),
        ("ws://host:1/ws", "ws://host:1/ws", "http://host:1/schema"),
        ("wss://host/env/ws/?key=1", "wss://host/env/ws?key=1", "https://host/env/schema"),
    ],
)
def test_urls(url: str, websocket: str, http: str) -> None:
    assert (websocket_url(url), http_url(url, "/schema")) == (websocket, http)


async def test_unknown_capacity_is_found_by_trial() -> None:
    with ProtocolServer(capacity=5, close_s=0.02) as server:
        await asyncio.gather(*(play(server.url, pause_s=0.05) for _ in range(60)))
        assert (server.max_open, server.n_made) == (5, 60)
        first = server.n_refused
        assert first <= 80  # every session once, without repetition
        await asyncio.gather(*(play(server.url, pause_s=0.05) for _ in range(60)))
        assert server.n_made == 120
        assert server.n_refused - first < 20  # 55 without a queue


async def test_full_server_is_retried_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "PROBE_S", 0.5)
    with ProtocolServer(capacity=1) as server:
        async with OpenEnvSession(server.url) as holder:
            await holder.reset()
            with pytest.raises(CapacityReached, match=r"capacity_timeout_s=0.5; raise max_concurrent_envs"):
                await play(server.url, SessionOptions(capacity_timeout_s=0.5))
            server.n_refused = 0
            waiting = asyncio.create_task(play(server.url))
            await asyncio.sleep(0.8)
            assert server.n_refused <= 8  # retries back off
            await wait_until_async(lambda: server.n_refused >= 2)
        await asyncio.wait_for(waiting, 30)
    await wait_for_no_tasks()


async def test_cancellation_at_any_moment_leaves_nothing_behind(server: ProtocolServer) -> None:
    server.capacity = 4
    with no_leaks():
        for step in range(40):
            tasks = [asyncio.create_task(play(server.url, pause_s=0)) for _ in range(3)]
            for _ in range(step):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await wait_for_no_tasks()
    await asyncio.wait_for(asyncio.gather(*(play(server.url) for _ in range(8))), 60)
    places = slots.slots_for(websocket_url(server.url))
    assert (places._n_taken, places._n_playing, len(places._waiting)) == (0, 0, 0)


async def test_close_waits_for_the_environment_until_its_timeout(server: ProtocolServer) -> None:
    server.capacity, server.close_s = 1, 0.1
    for _ in range(4):
        await play(server.url)
    assert (server.n_made, server.n_refused) == (4, 0)
    server.close_s = 60
    session = OpenEnvSession(server.url, SessionOptions(close_timeout_s=0.2))
    await session.reset()
    await asyncio.wait_for(session.close(), 50)
    await wait_for_no_tasks()
