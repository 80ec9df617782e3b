"""Isolation: faulty environments end only their own rollout, and no thread, process or file descriptor leaks."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from generators.conftest import MakeStage, Stage, story
from generators.faulty import METHODS, RAISED, RELEASED, RUBBISH
from generators.test_skyrl_gym_generator_failures import tokens_and_rewards

import skyrl_gym
from skyrl_gym.envs.registration import deregister
from skyrl_train.errors import EngineError
from skyrl_train.generators.base import RolloutRequest
from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.types import Trajectory

ENVS = {
    "faulty": "generators.faulty:FaultyEnv",
    "faulty_async": "generators.faulty:FaultyAsyncEnv",
    "awaited": "generators.faulty:AwaitedEnv",
}


@pytest.fixture(autouse=True)
def environments() -> Iterator[None]:
    for name, entry_point in ENVS.items():
        skyrl_gym.register(name, entry_point)
    yield
    for name in ENVS:
        deregister(name)


@pytest.fixture(autouse=True)
async def no_leaks() -> AsyncIterator[None]:
    """Compare threads, child processes and file descriptors before and after the test."""
    RELEASED.clear()
    process = psutil.Process()
    threads, n_fds = set(threading.enumerate()), process.num_fds()
    children = set(process.children(recursive=True))
    yield
    assert set(process.children(recursive=True)) <= children
    await asyncio.sleep(0)
    left = {t for t in set(threading.enumerate()) - threads if not t.name.startswith(("asyncio", "hf-engine"))}
    assert left == set()
    assert process.num_fds() <= n_fds


def faulty(uid: str, env_class: str = "faulty", **extras: Any) -> RolloutRequest:
    return story(uid, env_class=env_class, **extras)


def thread_faults() -> list[dict[str, Any]]:
    """Return faults of an environment in a thread that neither end nor slow down the whole process."""
    faults = [{"where": where, "fault": fault} for where in METHODS for fault in (*RAISED, "sleep")]
    faults += [{"where": "init", "fault": fault} for fault in ("none", "string")]
    return faults + [{"where": "step", "fault": fault, "turn": turn} for fault in RUBBISH for turn in (1, 2, 3)]


async def play(stage: Stage, requests: list[RolloutRequest]) -> list[Trajectory]:
    stage.sampling = replace(stage.sampling, max_new_tokens=2)
    try:
        async with asyncio.timeout(240):
            return await stage.play(requests)
    finally:
        RELEASED.set()
        await stage.generator.close()


def check(trajectories: list[Trajectory], requests: list[RolloutRequest], healthy: Trajectory) -> Counter[str]:
    """Assert that healthy rollouts are complete and faulty ones invalid; return the stop reasons of the faulty ones."""
    reasons: Counter[str] = Counter()
    for t, request in zip(trajectories, requests, strict=True):
        where = request.row.env_extras.get("where")
        if where is None or where == "close":
            assert t.is_valid, (t.error, request)
            assert (len(t.turns), t.total_reward) == (len(healthy.turns), 6.0)
        else:
            assert not t.is_valid, request
            assert t.error
            reasons[t.stop_reason] += 1
    return reasons


async def test_every_fault_in_a_thread_ends_one_rollout(make_stage: MakeStage) -> None:
    requests = [faulty(str(i), **extras) for i, extras in enumerate(thread_faults())]
    requests += [faulty(f"h{i}") for i in range(20)]
    requests += [
        faulty(f"a{i}", "faulty_async", where=where, fault="await") for i, where in enumerate(("init", "step"))
    ]
    requests.append(faulty("a9", "faulty_async"))
    stage = make_stage(skyrl_gym={"call_timeout_seconds": 0.3, "max_env_workers": 8}, n_rollout_retries=1)
    trajectories = await play(stage, requests)
    reasons = check(trajectories, requests, trajectories[-1])
    assert reasons["env_timeout"] == 4 + 2
    assert reasons["reward_unknown"] == 3
    assert {t.n_attempts for t in trajectories if t.stop_reason == "env_timeout"} == {2}
    assert {t.n_attempts for t in trajectories if t.stop_reason == "reward_unknown"} == {1}


async def test_an_environment_in_a_busy_loop_ends_only_its_own_rollout(make_stage: MakeStage) -> None:
    requests = [faulty("spin", where="step", fault="spin"), *(faulty(f"h{i}") for i in range(5))]
    trajectories = await play(make_stage(skyrl_gym={"call_timeout_seconds": 2.0}), requests)
    assert check(trajectories, requests, trajectories[-1]) == {"env_timeout": 1}


async def test_two_thousand_rollouts_of_which_a_tenth_have_faults(make_stage: MakeStage) -> None:
    rng = random.Random(0)
    faults = [fault for fault in thread_faults() if fault["fault"] != "sleep"]
    faults += [{"where": where, "fault": "sleep"} for where in ("init", "step", "close")]
    requests = [faulty(str(i), **(rng.choice(faults) if rng.random() < 0.1 else {})) for i in range(2000)]
    stage = make_stage(skyrl_gym={"call_timeout_seconds": 0.5, "max_env_workers": 16}, n_rollout_retries=1)
    trajectories = await play(stage, requests)
    reasons = check(trajectories, requests, next(t for t in trajectories if t.is_valid))
    assert 120 < sum(reasons.values()) < 220
    assert set(reasons) == {"env_error", "env_timeout", "reward_unknown"}
    second_stage = make_stage(skyrl_gym={"max_env_workers": 16})
    healthy = [i for i, request in enumerate(requests) if not request.row.env_extras.get("where")][:100]
    expected = await play(second_stage, [requests[i] for i in healthy])
    assert tokens_and_rewards([trajectories[i] for i in healthy]) == tokens_and_rewards(expected)


async def test_a_rollout_that_exceeds_its_time_limit(make_stage: MakeStage) -> None:
    stage = make_stage(trajectory_timeout_seconds=3, skyrl_gym={"max_env_workers": 2})
    slow = faulty("slow", where="step", fault="sleep", turn=2)
    trajectories = await play(stage, [slow, faulty("a")])
    assert (trajectories[0].stop_reason, trajectories[1].is_valid) == ("trajectory_timeout", True)
    assert trajectories[0].error == "it was not over after 3 s"
    assert len(trajectories[0].turns) == 2


async def test_a_rollout_with_an_engine_error_is_retried(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(n_rollout_retries=1)
    expected = await stage.play([faulty("a"), faulty("b")])
    generate, n_calls = stage.engine.generate, [0]

    async def flaky(requests: list[EngineRequest]) -> list[EngineResult]:
        n_calls[0] += 1
        if n_calls[0] == 2:
            raise EngineError("out of memory")
        return await generate(requests)

    monkeypatch.setattr(stage.engine, "generate", flaky)
    trajectories = await stage.play([faulty("a"), faulty("b")])
    assert sorted(t.n_attempts for t in trajectories) == [1, 2]
    assert tokens_and_rewards(trajectories) == tokens_and_rewards(expected)

    async def broken(requests: object) -> list[EngineResult]:
        raise EngineError("out of memory")

    monkeypatch.setattr(stage.engine, "generate", broken)
    (t,) = await stage.play([faulty("a")])
    assert (t.stop_reason, t.error, t.n_attempts) == ("engine_error", "out of memory", 2)
