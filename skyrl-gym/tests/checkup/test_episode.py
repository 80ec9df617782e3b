from collections.abc import Iterator
from typing import Any

import pytest
from gym_kit.environments import ROW, GoodEnv

from skyrl_gym.checkup.episode import REPLIES, EpisodeSpec, Player, RuleViolation, play_all, play_episode
from skyrl_gym.checkup.executor import Executor
from skyrl_gym.envs.registration import EnvSpec

calls: list[str] = []


class CallRecorder(GoodEnv):
    """Records each call with the number in its row."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__(env_config, extras)
        self.number = extras["number"]

    def init(self, prompt: Any) -> Any:
        calls.append(f"init {self.number}")
        return super().init(prompt)

    def step(self, action: str) -> Any:
        calls.append(f"step {self.number}")
        if action == REPLIES["whitespace"]:
            raise ValueError("space")
        return super().step(action)

    def close(self) -> None:
        calls.append(f"close {self.number}")


class FailsToClose(GoodEnv):
    def step(self, action: str) -> Any:
        raise IndexError("list index out of range")

    def close(self) -> None:
        raise OSError("the door is stuck")


class QuotesReply(GoodEnv):
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
    return play_episode(EpisodeSpec.from_row(EnvSpec("mine", cls), ROW | row, {}), replies)


def test_episode_is_played_with_its_replies_and_closed_twice(executor: Executor) -> None:
    (episode,) = play_all([player(CallRecorder, ["plain text"] * 5, number=0)], executor)
    assert calls == ["init 0", "step 0", "step 0", "step 0", "close 0", "close 0"]
    assert episode.env_class is CallRecorder
    assert episode.is_done
    assert episode.metrics == {"steps": 3}
    assert [output["reward"] for output in episode.outputs] == [0.5, 0.5, 0.5]
    assert episode.answers == [(ROW["prompt"], {}), *episode.outputs, {"steps": 3}]
    assert episode.trained_values[0] == repr(ROW["prompt"])
    assert len(episode.trained_values) == 5


@pytest.mark.parametrize("concurrent", [False, True])
def test_failing_episode_is_closed_and_the_others_are_played_to_their_end(executor: Executor, concurrent: bool) -> None:
    players = [player(CallRecorder, ["whitespace" if i == 1 else "plain text"] * 3, number=i) for i in range(3)]
    with pytest.raises(RuleViolation, match=r"^step\(\) raised ValueError: space .*, for the reply: whitespace$"):
        play_all(players, executor, concurrent)
    assert [calls.count(f"step {i}") for i in range(3)] == [3, 1, 3]
    assert [calls.count(f"close {i}") for i in range(3)] == [2, 1, 2]


def test_close_error_is_reported_after_the_first_error(executor: Executor) -> None:
    message = (
        r"^step\(\) raised IndexError: .*, for the reply: empty text\. Then close\(\) raised OSError: the door is stuck"
    )
    with pytest.raises(RuleViolation, match=message):
        play_all([player(FailsToClose, ["empty text"])], executor)


@pytest.mark.parametrize(("reply", "message"), [("a lone surrogate", "r: \ud83d"), ("a million characters", "<a")])
def test_quoted_text_is_truncated(executor: Executor, reply: str, message: str) -> None:
    with pytest.raises(RuleViolation) as raised:
        play_all([player(QuotesReply, [reply])], executor)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 1000
