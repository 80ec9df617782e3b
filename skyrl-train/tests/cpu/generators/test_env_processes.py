"""Environments in separate processes: the guarantees of `test_isolation` and further ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from generators.conftest import MakeStage, story
from generators.faulty import DEATHS, HANGS, METHODS, RUBBISH
from generators.test_isolation import check, environments, faulty, no_leaks, play  # noqa: F401, two are fixtures
from generators.test_skyrl_gym_generator_failures import tokens_and_rewards


async def test_hanging_and_crashing_environments_end_only_their_own_rollout(make_stage: MakeStage) -> None:
    faults = [{"where": where, "fault": fault} for where in METHODS for fault in ("raise", "exit")]
    faults += [{"where": "step", "fault": fault, "turn": 2} for fault in (*HANGS, *DEATHS, *RUBBISH)]
    faults += [{"where": where, "fault": "os_exit"} for where in METHODS]
    requests = [faulty(str(i), **extras) for i, extras in enumerate(faults)] + [faulty(f"h{i}") for i in range(40)]
    stage = make_stage(
        skyrl_gym={"isolation": "process", "call_timeout_seconds": 3.0, "max_env_workers": 4}, n_rollout_retries=0
    )
    trajectories = await play(stage, requests)
    reasons = check(trajectories, requests, trajectories[-1])
    assert reasons["env_timeout"] == len(HANGS)
    # a process that exits in `close` has already finished its rollout; sys.exit is reported as an error
    assert reasons["env_crashed"] == len(DEATHS) + 4 + 4
    crash = next(t for t in trajectories if t.error and "SIGKILL" in t.error)
    assert crash.error == "faulty.step raised EnvCrashed: its process ended by signal SIGKILL"


async def test_leaked_child_processes_end_with_the_process_of_their_environment(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    leaky = [faulty(str(i), where="get_metrics", fault="leak", pids=str(pids)) for i in range(6)]
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 2})
    trajectories = await play(stage, leaky)
    assert all(t.is_valid for t in trajectories)
    leaked = [int(pid) for pid in pids.read_text().split()]
    assert len(leaked) == 6
    async with asyncio.timeout(60):
        while any(is_running(pid) for pid in leaked):
            await asyncio.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_processes_and_threads_give_the_same_trajectories(make_stage: MakeStage) -> None:
    requests = [faulty(str(i)) for i in range(5)]
    in_threads = await play(make_stage(), requests)
    in_processes = await play(make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 2}), requests)
    assert tokens_and_rewards(in_processes) == tokens_and_rewards(in_threads)
    assert [t.env_metrics for t in in_processes] == [t.env_metrics for t in in_threads]


async def test_an_environment_that_a_process_cannot_import_is_refused(make_stage: MakeStage) -> None:
    (t,) = await play(make_stage(skyrl_gym={"isolation": "process"}), [story("a")])
    assert not t.is_valid
    assert "register it as 'module:ClassName'" in str(t.error)


async def test_a_missing_or_wrong_interpreter_is_reported(make_stage: MakeStage, tmp_path: Any) -> None:
    for python, reason in (("/nowhere/python", "cannot be run: No such file"), ("/bin/true", "did not start")):
        stage = make_stage(skyrl_gym={"isolation": "process", "python": python})
        (t,) = await play(stage, [faulty("a")])
        assert reason in str(t.error)


@pytest.mark.parametrize("batched", [False, True], ids=["each on its own", "batched"])
async def test_more_rollouts_than_processes(make_stage: MakeStage, batched: bool) -> None:
    requests = [faulty(str(i)) for i in range(5)]
    expected = await play(make_stage(batched=batched), requests)
    stage = make_stage(batched=batched, skyrl_gym={"isolation": "process", "max_env_workers": 2})
    assert tokens_and_rewards(await play(stage, requests)) == tokens_and_rewards(expected)


async def test_waiting_for_a_process_does_not_count_towards_the_time_limit(make_stage: MakeStage) -> None:
    stage = make_stage(trajectory_timeout_seconds=1.8, skyrl_gym={"isolation": "process", "max_env_workers": 1})
    trajectories = await play(stage, [faulty(str(i), where="step", fault="nap") for i in range(5)])
    assert [t.error for t in trajectories] == [None] * 5


async def test_async_methods_run_in_a_process(make_stage: MakeStage) -> None:
    requests = [faulty(str(i), "awaited") for i in range(3)]
    in_threads = await play(make_stage(), requests)
    in_processes = await play(make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1}), requests)
    assert [t.error for t in in_processes] == [None] * 3
    assert tokens_and_rewards(in_processes) == tokens_and_rewards(in_threads)


async def test_a_row_without_json_is_reported_and_its_process_continues(make_stage: MakeStage) -> None:
    circle: dict[str, Any] = {}
    circle["itself"] = circle
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1})
    circular, odd, good = await play(stage, [faulty("c", extra=circle), faulty("o", extra=object()), faulty("g")])
    assert circular.error == "faulty.init raised ValueError: Circular reference detected"
    assert "cannot be written as JSON" in str(odd.error)
    assert good.is_valid


async def test_a_process_that_dies_between_episodes_loses_no_rollout(make_stage: MakeStage) -> None:
    stage, others = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1}), psutil.Process().children()
    await stage.play([faulty("a")])
    (worker,) = set(psutil.Process().children()) - set(others)
    worker.kill()
    async with asyncio.timeout(10):
        while psutil.pid_exists(worker.pid):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)  # the event loop reads the end of the connection
    (t,) = await play(stage, [faulty("b")])
    assert t.error is None


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.1, 0.3, 0.6])
async def test_a_cancelled_run_leaves_no_process(make_stage: MakeStage, seconds: float) -> None:
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 2})
    run = asyncio.create_task(play(stage, [faulty(str(i), where="step", fault="sleep") for i in range(4)]))
    await asyncio.sleep(seconds)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
