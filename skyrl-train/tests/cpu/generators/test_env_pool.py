import asyncio
import threading
from typing import Any

import pytest
from gym_kit.processes import wait_until_async
from train_kit.environments import METHODS, RAISED, RUBBISH, Journal
from train_kit.rollouts import MakeStage, check_faulty, faulty, story, tokens_and_rewards


class NotAnException(BaseException):
    """A `BaseException` that is not an `Exception`."""


RAISED_ERRORS = [kind("mine") for kind in (asyncio.CancelledError, SystemExit, NotAnException, TimeoutError)]
POOL_SETTINGS = {"in threads": {}, "inline": {"max_env_workers": 0}, "without a limit": {"call_timeout_seconds": None}}


@pytest.mark.parametrize("setting", POOL_SETTINGS)
@pytest.mark.parametrize("env_class", ["story", "async_story"])
async def test_any_exception_of_an_environment_ends_only_its_rollout(
    make_stage: MakeStage, journal: Journal, env_class: str, setting: str
) -> None:
    stage = make_stage(skyrl_gym=POOL_SETTINGS[setting])
    good = [story(uid, env_class=env_class) for uid in "ab"]
    expected = await stage.play(good)
    for error in RAISED_ERRORS:
        bad = [story(method, env_class=env_class, raises={method: error}) for method in ("step", "close")]
        async with asyncio.timeout(30):
            first, in_step, in_close, last = await stage.play([good[0], *bad, good[1]])
        assert tokens_and_rewards([first, last]) == tokens_and_rewards(expected)
        assert in_close.is_valid
        assert in_step.stop_reason == "env_error"
        assert f"{type(error).__name__}: mine" in str(in_step.error)
    assert journal.open_environments() == []


def thread_faults() -> list[dict[str, Any]]:
    """Return faults of an environment in a thread that neither end nor slow down the whole process."""
    faults = [{"where": where, "fault": fault} for where in METHODS for fault in (*RAISED, "sleep")]
    faults += [{"where": "init", "fault": fault} for fault in ("none", "string")]
    return faults + [{"where": "step", "fault": fault, "turn": turn} for fault in RUBBISH for turn in (1, 2, 3)]


@pytest.mark.usefixtures("without_leaks")
async def test_every_fault_in_a_thread_ends_one_rollout(make_stage: MakeStage) -> None:
    requests = [faulty(str(i), **extras) for i, extras in enumerate(thread_faults())]
    requests += [faulty(f"h{i}") for i in range(20)]
    hangs = [{"where": where, "fault": "await"} for where in ("init", "step")]
    requests += [faulty(f"a{i}", "FaultyAsyncEnv", **extras) for i, extras in enumerate([*hangs, {}])]
    stage = make_stage(skyrl_gym={"call_timeout_seconds": 0.5, "max_env_workers": 8}, n_rollout_retries=1)
    trajectories = await stage.play_faulty(requests)
    reasons = check_faulty(trajectories, requests)
    assert reasons["env_timeout"] == 4 + 2
    assert reasons["reward_unknown"] == 3
    assert {t.n_attempts for t in trajectories if t.stop_reason == "env_timeout"} == {2}
    assert {t.n_attempts for t in trajectories if t.stop_reason == "reward_unknown"} == {1}


async def test_an_environment_of_a_cancelled_rollout_is_closed(make_stage: MakeStage, journal: Journal) -> None:
    is_created = threading.Event()
    journal.do = {"make": is_created.set}
    rollout = asyncio.create_task(make_stage().play([story("a")]))
    await asyncio.sleep(0)  # the rollout waits for the thread that creates the environment
    assert is_created.wait(timeout=10)  # blocks the event loop, so the result is not delivered yet
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    await wait_until_async(lambda: len(journal.made) == 1 and journal.open_environments() == [])


async def test_a_hanging_environment_is_closed_when_its_call_returns(make_stage: MakeStage, journal: Journal) -> None:
    gate = threading.Event()
    journal.do = {"step": gate.wait}
    stage = make_stage(skyrl_gym={"call_timeout_seconds": 0.1})
    t = await stage.play_story()
    assert (t.stop_reason, t.error) == ("env_timeout", "story.step raised EnvTimeout: took longer than 0.1 s")
    assert journal.closed == []
    gate.set()
    await stage.generator.close()
    assert journal.open_environments() == []
