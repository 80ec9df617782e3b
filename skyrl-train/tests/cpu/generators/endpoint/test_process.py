"""The endpoint in another process: the same trajectories, a free event loop, and a process that crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace

import httpx
import pytest
from generators.endpoint.conftest import SAMPLING, AgentStage, catch_requests, new_client
from train_kit.processes import find_descendants

from examples.endpoint.agent import play_catch
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import BatchMetadata
from skyrl_train.generators.endpoint.process import EndpointProcess
from skyrl_train.types import PromptRow

TRAIN = BatchMetadata(1, "train")


async def test_trajectories_equal_those_of_an_endpoint_in_the_event_loop(agent_stage: AgentStage) -> None:
    greedy = replace(SAMPLING, temperature=0.0)
    expected = await agent_stage.play(play_catch, catch_requests(4), greedy)
    generator = agent_stage.generator(play_catch, in_own_process=True)
    for t, other in zip(await generator.rollout(catch_requests(4), greedy, TRAIN), expected, strict=True):
        assert (t.prompt_ids, t.response_ids, t.loss_mask) == (other.prompt_ids, other.response_ids, other.loss_mask)
        assert (t.rewards, t.stop_reason, t.env_metrics) == (other.rewards, other.stop_reason, other.env_metrics)
        assert t.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert t.timing["generate"] > 0
    assert len(list(find_descendants("spawn_main"))) == 1
    await generator.close()
    assert list(find_descendants("spawn_main")) == []


async def test_clients_do_not_wait_for_the_event_loop_of_the_trainer(agent_stage: AgentStage) -> None:
    waited_s = []

    def measures(**options: object) -> float:
        with httpx.Client(trust_env=False) as client:
            client.get(f"{options['base_url']}/models").raise_for_status()
            started = time.perf_counter()
            loop.call_soon_threadsafe(time.sleep, 3.0)
            client.get(f"{options['base_url']}/models").raise_for_status()
            waited_s.append(time.perf_counter() - started)
        return 1.0

    loop = asyncio.get_running_loop()
    for in_own_process in (True, False):
        await agent_stage.play(measures, catch_requests(1), in_own_process=in_own_process)
    assert waited_s[0] < 2 < waited_s[1]


async def test_a_crash_of_the_process_costs_its_rollouts_and_another_one_serves_the_next(
    agent_stage: AgentStage, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []

    async def kills(*, base_url: str, api_key: str, model: str, row: PromptRow, session_id: str) -> float:
        if not killed:
            (process,) = list(find_descendants("spawn_main"))
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)
        async with new_client(base_url) as client:
            await client.chat.completions.create(model=model, messages=row.prompt)
        return 1.0

    generator = agent_stage.generator(kills, in_own_process=True)
    (lost,) = await generator.rollout(catch_requests(1), SAMPLING, TRAIN)
    assert lost.stop_reason == "engine_error"
    assert lost.error is not None
    assert "ended with exit status -9" in lost.error
    caplog.set_level("WARNING")
    generator._agent = play_catch
    trajectories = await generator.rollout(catch_requests(2), SAMPLING, TRAIN)
    assert all(t.is_valid for t in trajectories)
    assert "The process of the endpoint has ended; another one is started" in caplog.text


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
