from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from adapters.openenv_contract import no_tasks_left, nothing_left
from adapters.openenv_server import ProtocolServer

from skyrl_gym.adapters.openenv_client import (
    CapacityReached,
    OpenEnvSession,
    SessionOptions,
    http_url,
    websocket_url,
)
from skyrl_gym.adapters.openenv_places import places_of


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
def test_addresses(url: str, websocket: str, http: str) -> None:
    assert (websocket_url(url), http_url(url, "/schema")) == (websocket, http)


async def test_no_more_sessions_than_configured(server: ProtocolServer) -> None:
    await asyncio.gather(*(play(server.url, SessionOptions(max_sessions=3)) for _ in range(20)))
    assert (server.most_open, server.n_refused, server.n_made) == (3, 0, 20)


async def test_a_capacity_that_nobody_told_is_found_out() -> None:
    with ProtocolServer(capacity=5, close_s=0.02) as server:
        await asyncio.gather(*(play(server.url, pause_s=0.05) for _ in range(60)))
        assert (server.most_open, server.n_made) == (5, 60)
        first = server.n_refused
        assert first <= 80  # everyone once, and not again and again
        await asyncio.gather(*(play(server.url, pause_s=0.05) for _ in range(60)))
        assert server.n_made == 120
        assert server.n_refused - first < 20  # 55, were it asked without a queue


async def test_a_full_server_is_asked_again_for_a_while() -> None:
    with ProtocolServer(capacity=1) as server:
        async with OpenEnvSession(server.url) as holder:
            await holder.reset()
            started = time.monotonic()
            with pytest.raises(CapacityReached, match=r"capacity_timeout_s=0.5; raise max_concurrent_envs"):
                await play(server.url, SessionOptions(capacity_timeout_s=0.5))
            assert time.monotonic() - started < 60
        await play(server.url)
    await no_tasks_left()


async def test_sessions_of_others_are_waited_for_with_growing_pauses() -> None:
    with ProtocolServer(capacity=1) as server:
        server.n_open = 1  # somebody else's
        waiting = asyncio.create_task(play(server.url))
        await asyncio.sleep(0.8)
        assert server.n_refused <= 8
        async with asyncio.timeout(30):
            while server.n_refused < 2:
                await asyncio.sleep(0.01)
        server.n_open = 0
        await asyncio.wait_for(waiting, 30)


async def test_places_are_probed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_gym.adapters.openenv_places.PROBE_S", 0.1)
    with ProtocolServer(capacity=4) as server:
        server.n_open = 3  # somebody else's
        first = [asyncio.create_task(play(server.url, pause_s=0.05)) for _ in range(6)]
        await asyncio.sleep(0.2)
        server.n_open -= 3
        await asyncio.gather(*first)
        server.most_open = 0
        await asyncio.gather(*(play(server.url, pause_s=0.1) for _ in range(30)))
        assert server.most_open == 4


async def test_whoever_is_cancelled_while_waiting_takes_no_place(server: ProtocolServer) -> None:
    options = SessionOptions(max_sessions=1)
    async with OpenEnvSession(server.url, options) as holder:
        await holder.reset()
        waiting = [asyncio.create_task(play(server.url, options)) for _ in range(5)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(play(server.url, options), 30)
    await no_tasks_left()


async def test_cancelling_at_any_moment_leaves_nothing(server: ProtocolServer) -> None:
    server.capacity = 4
    with nothing_left():
        for step in range(40):
            tasks = [asyncio.create_task(play(server.url, pause_s=0)) for _ in range(3)]
            for _ in range(step):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await no_tasks_left()
    await asyncio.wait_for(asyncio.gather(*(play(server.url) for _ in range(8))), 60)
    places = places_of(websocket_url(server.url))
    assert (places._n_taken, places._n_playing, len(places._waiting)) == (0, 0, 0)


def test_places_are_shared_between_event_loops(server: ProtocolServer) -> None:
    options = SessionOptions(max_sessions=1)

    async def many() -> None:
        await asyncio.gather(*(play(server.url, options) for _ in range(5)))

    async def in_three_threads() -> None:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, many()) for _ in range(3)))

    asyncio.run(in_three_threads())
    assert (server.most_open, server.n_made) == (1, 15)


async def test_a_session_is_closed_when_its_environment_is_put_away() -> None:
    with ProtocolServer(capacity=1, close_s=0.1) as server:
        for _ in range(4):
            await play(server.url)
        assert (server.n_made, server.n_refused) == (4, 0)


async def test_a_server_that_does_not_hang_up_is_left(server: ProtocolServer) -> None:
    server.close_s = 5
    session = OpenEnvSession(server.url, SessionOptions(close_timeout_s=0.2))
    await session.reset()
    started = time.monotonic()
    await session.close()
    assert time.monotonic() - started < 4
    await no_tasks_left()
