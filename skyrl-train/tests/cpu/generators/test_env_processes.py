import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest
from gym_kit.processes import is_running
from train_kit.environments import DEATHS, HANGS, METHODS, RUBBISH
from train_kit.rollouts import MakeStage, check_faulty, faulty, story, tokens_and_rewards

from skyrl_gym.runtime import env_processes

pytestmark = pytest.mark.usefixtures("without_leaks")


async def test_hanging_and_crashing_environments_end_only_their_own_rollout(make_stage: MakeStage) -> None:
    faults = [{"where": where, "fault": fault} for where in METHODS for fault in ("raise", "exit")]
    faults += [{"where": "step", "fault": fault, "turn": 2} for fault in (*HANGS, *DEATHS, *RUBBISH)]
    faults += [{"where": where, "fault": "os_exit"} for where in METHODS]
    requests = [faulty(str(i), **extras) for i, extras in enumerate(faults)] + [faulty(f"h{i}") for i in range(12)]
    stage = make_stage(
        skyrl_gym={"isolation": "process", "call_timeout_seconds": 3.0, "max_env_workers": 4}, n_rollout_retries=0
    )
    trajectories = await stage.play_faulty(requests)
    reasons = check_faulty(trajectories, requests)
    assert reasons["env_timeout"] == len(HANGS)
    # a process that exits in `close` has already finished its rollout; sys.exit is reported as an error
    assert reasons["env_crashed"] == len(DEATHS) + 4 + 4
    crash = next(t for t in trajectories if t.error and "SIGKILL" in t.error)
    assert crash.error == "train_kit.environments:FaultyEnv.step raised EnvCrashed: its process ended by signal SIGKILL"


async def test_leaked_processes_end_with_the_process_of_their_environment(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    leaky = [faulty(str(i), where="get_metrics", fault="leak", pids=str(pids)) for i in range(6)]
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 2})
    trajectories = await stage.play_faulty(leaky)
    assert all(t.is_valid for t in trajectories)
    leaked = [int(pid) for pid in pids.read_text().split()]
    assert len(leaked) == 6
    async with asyncio.timeout(60):
        while any(is_running(pid) for pid in leaked):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seconds", [0, 60])
async def test_idle_processes_clean_up_before_they_end(
    seconds: int, make_stage: MakeStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_processes, "EXIT_SECONDS", 60.0 if seconds == 0 else 0.5)
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1})
    (t,) = await stage.play_faulty([faulty("a", "TidyEnv", file=str(tmp_path / "clean"), seconds=seconds)])
    assert t.is_valid, t.error
    assert (tmp_path / "clean").exists() == (seconds == 0)


async def test_an_environment_that_a_process_cannot_import_is_refused(make_stage: MakeStage) -> None:
    (t,) = await make_stage(skyrl_gym={"isolation": "process"}).play_faulty([story("a")])
    assert not t.is_valid
    assert "register it as 'module:ClassName'" in str(t.error)


async def test_a_missing_or_wrong_interpreter_is_reported(make_stage: MakeStage, tmp_path: Any) -> None:
    for python, reason in (("/nowhere/python", "python=/nowhere/python: No such file"), ("/bin/true", "did not start")):
        stage = make_stage(skyrl_gym={"isolation": "process", "python": python})
        (t,) = await stage.play_faulty([faulty("a")])
        assert reason in str(t.error)


@pytest.mark.parametrize("batched", [False, True], ids=["each on its own", "batched"])
async def test_more_rollouts_than_processes(make_stage: MakeStage, batched: bool) -> None:
    requests = [faulty(str(i)) for i in range(5)]
    expected = await make_stage(batched=batched).play_faulty(requests)
    stage = make_stage(batched=batched, skyrl_gym={"isolation": "process", "max_env_workers": 2})
    played = await stage.play_faulty(requests)
    assert tokens_and_rewards(played) == tokens_and_rewards(expected)
    assert [t.env_metrics for t in played] == [t.env_metrics for t in expected]


async def test_waiting_for_a_process_does_not_count_towards_the_time_limit(make_stage: MakeStage) -> None:
    stage = make_stage(trajectory_timeout_seconds=1.8, skyrl_gym={"isolation": "process", "max_env_workers": 1})
    trajectories = await stage.play_faulty([faulty(str(i), where="step", fault="nap") for i in range(5)])
    assert [t.error for t in trajectories] == [None] * 5


async def test_async_methods_run_in_a_process(make_stage: MakeStage) -> None:
    requests = [faulty(str(i), "AwaitedEnv") for i in range(3)]
    in_threads = await make_stage().play_faulty(requests)
    in_processes = await make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1}).play_faulty(requests)
    assert [t.error for t in in_processes] == [None] * 3
    assert tokens_and_rewards(in_processes) == tokens_and_rewards(in_threads)


async def test_a_row_without_json_is_reported_and_its_process_continues(make_stage: MakeStage) -> None:
    circle: dict[str, Any] = {}
    circle["itself"] = circle
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 1})
    circular, odd, good = await stage.play_faulty([faulty("c", extra=circle), faulty("o", extra=object()), faulty("g")])
    assert circular.error == "train_kit.environments:FaultyEnv.init raised ValueError: Circular reference detected"
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
    (t,) = await stage.play_faulty([faulty("b")])
    assert t.error is None


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.5])
async def test_a_cancelled_run_leaves_no_process(make_stage: MakeStage, seconds: float) -> None:
    stage = make_stage(skyrl_gym={"isolation": "process", "max_env_workers": 2})
    run = asyncio.create_task(stage.play_faulty([faulty(str(i), where="step", fault="sleep") for i in range(4)]))
    await asyncio.sleep(seconds)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
