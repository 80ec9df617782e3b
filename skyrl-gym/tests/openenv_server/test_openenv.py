"""The contract with servers of the package openenv, and an OpenSpiel game on one of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import pytest
from adapters.openenv.contract import OpenEnvContract, OpenEnvToolContract, check_no_leaks, wait_for_no_tasks
from openenv_server.conftest import RunningServer, running

from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv.client import OpenEnvError

QUESTION = [{"role": "user", "content": "Play."}]


class TestEcho(OpenEnvContract):
    """An environment with one field of text."""


class TestTools(OpenEnvToolContract):
    """An environment built on MCP."""


async def play_game(url: str, seed: int) -> tuple[list[str], float | None]:
    """Play random legal moves; return the observations and the reward."""
    env = OpenEnvEnv({"url": url}, {"seed": seed, "max_turns": 9})
    rng = random.Random(seed)
    try:
        prompt, _ = await env.init_async(QUESTION)
        shown = [prompt[-1]["content"]]
        while True:
            moves = re.findall(r"legal_actions\W+([\d, ]+)", shown[-1])[-1].split(",")
            output = await env.step_async(json.dumps({"action_id": int(rng.choice(moves))}))
            if output["done"]:
                return shown, output["reward"]
            shown.append(output["observations"][0]["content"])
    finally:
        await env.close_async()


@pytest.fixture(scope="module")
def games() -> Any:
    with running("openspiel", 64) as server:
        yield server


async def test_64_concurrent_games(games: RunningServer) -> None:
    with check_no_leaks():
        played = await asyncio.gather(*(play_game(games.url, seed) for seed in range(64)))
        await wait_for_no_tasks()
        await asyncio.get_running_loop().shutdown_default_executor()
    assert {reward for _, reward in played} <= {-1.0, 0.0, 1.0}
    assert len({reward for _, reward in played}) > 1
    assert played[7] == await play_game(games.url, 7)


@pytest.mark.parametrize("reply", ["I do not know.", '{"action": 3}', '{"action_id": "three"}', ""])
async def test_invalid_reply_is_explained(games: RunningServer, reply: str) -> None:
    env = OpenEnvEnv({"url": games.url}, {})
    await env.init_async(QUESTION)
    output = await env.step_async(reply)
    assert not output["done"]
    assert "action_id" in output["observations"][0]["content"]
    assert env.get_metrics()["invalid_actions"] == 1
    await env.close_async()


async def test_illegal_move_raises_or_is_explained(games: RunningServer) -> None:
    env = OpenEnvEnv({"url": games.url}, {})
    await env.init_async(QUESTION)
    with pytest.raises(OpenEnvError, match="action_id=99 is not legal"):
        await env.step_async('{"action_id": 99}')
    await env.close_async()
    env = OpenEnvEnv({"url": games.url, "execution_error": "tell"}, {})
    await env.init_async(QUESTION)
    output = await env.step_async('{"action_id": 99}')
    assert "action_id=99 is not legal" in output["observations"][0]["content"]
    await env.close_async()


async def test_episodes_of_a_killed_server_fail_at_once() -> None:
    with running("echo", 64) as server, check_no_leaks():
        envs = [OpenEnvEnv({"url": server.url}, {}) for _ in range(32)]
        await asyncio.gather(*(env.init_async(QUESTION) for env in envs))
        server.process.kill()
        started = time.monotonic()
        results = await asyncio.gather(*(env.step_async("hello") for env in envs), return_exceptions=True)
        assert all(isinstance(result, OpenEnvError) for result in results)
        assert time.monotonic() - started < 10
        await asyncio.gather(*(env.close_async() for env in envs))
        await wait_for_no_tasks()
        await asyncio.get_running_loop().shutdown_default_executor()
