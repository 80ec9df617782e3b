"""The contract with servers of the package openenv, and an OpenSpiel game on one of them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gym_kit.messages import message_text, user
from gym_kit.openenv_contract import OpenEnvContract, OpenEnvToolContract
from gym_kit.processes import free_port, no_leaks, wait_for_no_tasks
from gym_kit.servers import run_server

from skyrl_gym.adapters.openenv import OpenEnvEnv
from skyrl_gym.adapters.openenv.client import OpenEnvError

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-openenv/bin/python"
QUESTION = user("Play.")


@dataclass(frozen=True)
class RunningServer:
    """A server and its maximum number of sessions."""

    url: str
    capacity: int
    process: subprocess.Popen[bytes]
    tool: str = "repeat"


@contextmanager
def running(name: str, capacity: int) -> Iterator[RunningServer]:
    """Run a server of `serve.py`."""
    port = free_port()
    with run_server([str(PYTHON), str(HERE / "serve.py"), name, str(port), str(capacity)], port) as process:
        yield RunningServer(f"http://127.0.0.1:{port}", capacity, process)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running("echo", 16) as server:
        yield server


@pytest.fixture(scope="module")
def tool_server() -> Iterator[RunningServer]:
    with running("tools", 16) as server:
        yield server


@pytest.fixture(scope="module")
def games() -> Iterator[RunningServer]:
    with running("openspiel", 64) as server:
        yield server


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
            shown.append(message_text(output))
    finally:
        await env.close_async()


async def test_64_concurrent_games(games: RunningServer) -> None:
    with no_leaks():
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
    assert "action_id" in message_text(output)
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
    assert "action_id=99 is not legal" in message_text(output)
    await env.close_async()


async def test_episodes_of_a_killed_server_fail_at_once() -> None:
    with running("echo", 64) as server, no_leaks():
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
