"""What environments in this process raise, or hold, is theirs: it ends one rollout, and everything is closed."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator

import pytest
from generators.conftest import MakeStage, story
from generators.environments import Journal, StoryEnv

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.envs.registration import deregister


class Unusual(BaseException):
    """No `Exception`."""


RAISED = {kind.__name__: kind for kind in (asyncio.CancelledError, SystemExit, Unusual, TimeoutError)}
HOW = {"in threads": {}, "inline": {"max_env_workers": 0}, "without a limit": {"call_timeout_seconds": None}}


class RaisingStory(StoryEnv):
    """Raises what its row says, where it says so."""

    def _visit(self, method: str) -> None:
        super()._visit(method)
        if self.extras.get("where") == method:
            raise RAISED[self.extras["raised"]]("mine")


class AwaitedStory(RaisingStory):
    """The same, told by methods that are awaited."""

    async def step_async(self, action: str) -> BaseTextEnvStepOutput:
        return self.step(action)

    async def close_async(self) -> None:
        self.close()


@pytest.fixture(autouse=True)
def stories(journal: Journal) -> Iterator[None]:
    for kind in (RaisingStory, AwaitedStory):
        skyrl_gym.register(kind.__name__, functools.partial(kind, journal))
    yield
    for kind in (RaisingStory, AwaitedStory):
        deregister(kind.__name__)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("env_class", ["RaisingStory", "AwaitedStory"])
@pytest.mark.parametrize("raised", RAISED)
async def test_whatever_an_environment_raises_ends_its_rollout_alone(
    make_stage: MakeStage, journal: Journal, raised: str, env_class: str, how: str
) -> None:
    stage = make_stage(skyrl_gym=HOW[how])
    good = [story(uid, env_class=env_class) for uid in "ab"]
    bad = [story(where, env_class=env_class, where=where, raised=raised) for where in ("step", "close")]
    expected = await stage.play(good)
    async with asyncio.timeout(30):
        first, in_step, in_close, last = await stage.play([good[0], *bad, good[1]])
    assert [t.response_ids for t in (first, last)] == [t.response_ids for t in expected]
    assert in_close.is_valid
    assert in_step.stop_reason == "env_error"
    assert f"{raised}: mine" in str(in_step.error)
    assert journal.open_environments() == []


async def test_a_limit_in_time_ends_what_is_awaited(make_stage: MakeStage, journal: Journal) -> None:
    class Sleeper(AwaitedStory):
        async def step_async(self, action: str) -> BaseTextEnvStepOutput:
            await asyncio.sleep(60)
            return self.step(action)

    skyrl_gym.register("sleeper", functools.partial(Sleeper, journal))
    try:
        (t,) = await make_stage(skyrl_gym={"call_timeout_seconds": 0.1}).play([story("a", env_class="sleeper")])
    finally:
        deregister("sleeper")
    assert (t.stop_reason, t.error) == ("env_timeout", "sleeper.step raised EnvTimeout: took longer than 0.1 s")


async def test_an_environment_that_was_made_as_its_rollout_was_cancelled_is_closed(
    make_stage: MakeStage, journal: Journal
) -> None:
    stage = make_stage()
    rollout = asyncio.create_task(stage.play([story("a")]))
    await asyncio.sleep(0)  # now it waits for the thread that makes the environment,
    answers = stage.generator._episodes._pool._answers
    deadline = time.monotonic() + 60
    while not answers:  # which has made it,
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rollout.cancel()  # and nobody has heard of it
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert len(journal.made) == 1
    assert journal.open_environments() == []
