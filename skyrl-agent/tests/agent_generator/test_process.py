"""The endpoint in another process: the same trajectories, a free event loop, and a process that crashes."""

import asyncio
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from agent_kit.agents import SAMPLING, TRAIN, AgentStage, ask_once, assert_equal_trajectories, catch_requests
from agent_kit.endpoints import new_client
from endpoint_catch.agent import play_catch
from train_kit.processes import find_descendants

from skyrl_agent.endpoint.process import EndpointProcess
from skyrl_train.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_processes")


async def test_trajectories_equal_those_of_an_endpoint_in_the_event_loop(agent_stage: AgentStage) -> None:
    greedy = replace(SAMPLING, temperature=0.0)
    expected = await agent_stage.play(play_catch, catch_requests(2), greedy)
    generator = agent_stage.generator(play_catch, in_own_process=True)
    trajectories = await generator.rollout(catch_requests(2), greedy, TRAIN)
    assert_equal_trajectories(trajectories, expected)
    assert all(t.timing["generate"] > 0 for t in trajectories)
    assert len(list(find_descendants("spawn_main"))) == 1
    await generator.close()
    assert list(find_descendants("spawn_main")) == []


async def test_clients_do_not_wait_for_the_event_loop_of_the_trainer(agent_stage: AgentStage) -> None:
    loop, are_answered = asyncio.get_running_loop(), []

    def ask_while_the_event_loop_is_blocked(*, base_url: str, **_: object) -> float:
        released = threading.Event()
        with httpx.Client(trust_env=False, timeout=30 if not are_answered else 0.5) as client:
            client.get(f"{base_url}/models").raise_for_status()
            loop.call_soon_threadsafe(released.wait)
            try:
                are_answered.append(client.get(f"{base_url}/models").is_success)
            except httpx.ReadTimeout:
                are_answered.append(False)
            finally:
                released.set()
        return 1.0

    for in_own_process in (True, False):
        await agent_stage.play(ask_while_the_event_loop_is_blocked, catch_requests(1), in_own_process=in_own_process)
    assert are_answered == [True, False]


async def test_a_crash_of_the_process_costs_its_rollouts_and_another_one_serves_the_next(
    agent_stage: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []

    async def kills(**options: Any) -> float:
        if not killed:
            (process,) = list(find_descendants("spawn_main"))
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)
        return await ask_once(**options)

    generator = agent_stage.generator(kills, in_own_process=True)
    (lost,) = await generator.rollout(catch_requests(1), SAMPLING, TRAIN)
    assert lost.stop_reason == "engine_error"
    assert "ended with exit status -9" in lost.error
    caplog.set_level("WARNING")
    generator._agent = play_catch
    trajectories = await generator.rollout(catch_requests(2), SAMPLING, TRAIN)
    assert all(t.is_valid for t in trajectories)
    assert "The endpoint's process has crashed; starting a new one" in caplog.text


async def test_requests_without_a_session_wait_between_rollouts(agent_stage: AgentStage) -> None:
    urls, waiting = [], []

    async def play(*, base_url: str, **options: object) -> float:
        urls.append(base_url.partition("/session")[0] + "/v1")
        await asyncio.gather(*waiting)
        return 0.0

    generator = agent_stage.generator(play, in_own_process=True)
    await generator.rollout(catch_requests(1), SAMPLING, TRAIN)
    async with new_client(urls[0]) as client:
        asking = asyncio.create_task(client.completions.create(model="policy", prompt="State", max_tokens=2))
        await asyncio.sleep(0.5)
        assert not asking.done()
        assert not agent_stage.engine._unfinished()
        waiting.append(asking)
        await generator.rollout(catch_requests(1), SAMPLING, TRAIN)
        assert (await asking).usage.completion_tokens == 2


async def test_an_address_that_is_taken_is_refused(agent_stage: AgentStage) -> None:
    endpoint = EndpointProcess(agent_stage.engine, agent_stage.generator(play_catch)._make_service)
    await endpoint.start()
    port = int(endpoint.url().rpartition(":")[2].removesuffix("/v1"))
    second = EndpointProcess(agent_stage.engine, agent_stage.generator(play_catch)._make_service)
    with pytest.raises(ConfigError, match=rf"the endpoint cannot listen on 127\.0\.0\.1:{port}"):
        await second.start(port=port)
    assert len(list(find_descendants("spawn_main"))) == 1
    await endpoint.close()
