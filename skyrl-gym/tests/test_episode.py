from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from broken_envs import ROW, CloseTwice, GoodEnv, Parses

from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.episode import REPLIES, Broken, Hang, Player, Task, play_all, play_episode
from skyrl_gym.executor import Executor

calls: list[str] = []


class Noting(GoodEnv):
    """Notes each call, by the number that its row has."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.number = extras["number"]

    def init(self, prompt: Any) -> Any:
        calls.append(f"init {self.number}")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        calls.append(f"step {self.number}")
        if action == REPLIES["space"]:
            raise ValueError("space")
        return super().step(action)

    def close(self) -> None:
        calls.append(f"close {self.number}")


class ClosesBadly(Parses):
    def close(self) -> None:
        raise OSError("the door is stuck")


class Strange(GoodEnv):
    """Its error and its answer quote what was said to it."""

    def step(self, action: str) -> Any:
        if len(action) < 10:
            raise ValueError(action)
        return super().step(action) | {"reward": action}


@pytest.fixture
def executor() -> Iterator[Executor]:
    calls.clear()
    with Executor(3, limit_s=10) as executor:
        yield executor


def player(cls: type[GoodEnv], replies: list[str], **row: Any) -> Player:
    return play_episode(Task.of(EnvSpec("mine", cls), ROW | row, {}), replies)


def test_an_episode_is_played_with_replies_and_closed_twice(executor: Executor) -> None:
    (episode,) = play_all([player(Noting, ["words"] * 5, number=0)], executor)
    assert calls == ["init 0", "step 0", "step 0", "step 0", "close 0", "close 0"]
    assert episode.env_class is Noting
    assert episode.is_done
    assert episode.metrics == {"steps": 3}
    assert [output["reward"] for output in episode.outputs] == [0.5, 0.5, 0.5]
    assert episode.answers == [(ROW["prompt"], {}), *episode.outputs, {"steps": 3}]
    assert episode.read[0] == repr(ROW["prompt"])
    assert len(episode.read) == 5


def test_replies_may_end_first(executor: Executor) -> None:
    (episode,) = play_all([player(GoodEnv, ["words"])], executor)
    assert not episode.is_done


def test_episodes_take_turns(executor: Executor) -> None:
    episodes = play_all([player(Noting, ["words"] * (i + 1), number=i) for i in range(2)], executor)
    assert calls[:4] == ["init 0", "init 1", "step 0", "step 1"]
    assert calls[4:] == ["step 1", "close 0", "close 0", "close 1", "close 1"]
    assert [len(episode.outputs) for episode in episodes] == [1, 2]


@pytest.mark.parametrize("at_once", [False, True])
def test_one_that_breaks_is_closed_and_the_others_are_played_to_their_end(executor: Executor, at_once: bool) -> None:
    players = [player(Noting, ["space" if i == 1 else "words"] * 3, number=i) for i in range(3)]
    with pytest.raises(Broken, match=r"^step\(\) raised ValueError: space .*, for the reply: space$"):
        play_all(players, executor, at_once)
    assert [calls.count(f"step {i}") for i in range(3)] == [3, 1, 3]
    assert [calls.count(f"close {i}") for i in range(3)] == [2, 1, 2]


def test_what_goes_wrong_in_closing_comes_after_what_went_wrong_first(executor: Executor) -> None:
    told = r"^step\(\) raised IndexError: .*, for the reply: nothing\. Then close\(\) raised OSError: the door is stuck"
    with pytest.raises(Broken, match=told):
        play_all([player(ClosesBadly, ["nothing"])], executor)


def test_it_must_bear_to_be_closed_twice(executor: Executor) -> None:
    with pytest.raises(Broken, match=r"close\(\) raised AssertionError: closed already .*, the second time"):
        play_all([player(CloseTwice, [])], executor)


@pytest.mark.parametrize(("reply", "told"), [("half a character", "r: \ud83d"), ("a million characters", "<a")])
def test_what_is_quoted_is_cut(executor: Executor, reply: str, told: str) -> None:
    with pytest.raises(Broken) as raised:
        play_all([player(Strange, [reply])], executor)
    assert told in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_a_hang_is_told_from_what_is_broken() -> None:
    assert issubclass(Hang, Broken)


def test_a_task_is_copied_whole() -> None:
    task = Task.of(EnvSpec("mine", GoodEnv), ROW, {"inner": {"list": [1]}})
    copied = task.copy()
    assert copied == task
    copied.prompt[0]["content"] = copied.extras["reward_spec"]["ground_truth"] = "43"
    copied.env_config.inner.list.append(2)
    assert (task.prompt, task.extras["reward_spec"]) == (ROW["prompt"], {"ground_truth": "42"})
    assert task.env_config.inner.list == [1]
    assert task.max_turns == 3
