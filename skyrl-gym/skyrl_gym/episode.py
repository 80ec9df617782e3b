"""An episode without a model: an environment is given replies by name, and what it answers is checked.

An episode is a generator of calls, so that it can be played alone, in turns with others, or at the same time.
"""

from __future__ import annotations

import copy
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from skyrl_gym.contract import checked_metrics, checked_output, checked_prompt, reward_components
from skyrl_gym.env_config import EnvConfig, env_config_of
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.executor import Call, Executor, Outcome
from skyrl_gym.methods import awaited_method
from skyrl_gym.rows import prompt_and_extras

MOST_CHARS = 1_000_000
MOST_TOLD = 500  # characters of an error

REPLIES: Mapping[str, str] = {
    "nothing": "",
    "words": "I think that the answer is 42.",
    "space": " \n\t ",
    "an open tag": "<think><answer><tool_call>",
    "broken JSON": '<tool_call>{"name": "x", "arguments": {</tool_call>',
    "unlikely characters": "\x00\ufffd\u0664\u0662\U0001f600 \\boxed{\u221e} #### \u0664\u0662",
    "half a character": "\ud83d",
    "a million characters": "<answer>" * (MOST_CHARS // 8),
}
"""What a model writes that has not learned the format yet, and worse."""

OF_THREADS = (
    "training makes calls in threads other than the main one, or with environment.skyrl_gym.isolation=process in the "
    "main one of a process"
)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})

T = TypeVar("T")


class Broken(Exception):
    """A rule is broken; the text says how."""


class Hang(Broken):
    """A call does not come back, so that no other can be made."""


@dataclass(frozen=True, slots=True)
class Task:
    """What an episode is made from. Episodes of a row have a copy each."""

    spec: EnvSpec
    prompt: ConversationType
    extras: dict[str, Any]
    env_config: EnvConfig

    @classmethod
    def of(cls, spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any]) -> Task:
        """The task of a dataset row. Raises ValueError where training would not take it."""
        prompt, extras = prompt_and_extras(row)
        return cls(spec, prompt, extras, env_config_of(env_config))

    @property
    def max_turns(self) -> int:
        """How many turns an episode has at most."""
        return int(self.extras["max_turns"])

    def copy(self) -> Task:
        """The same, of which nothing is shared but the spec."""
        return Task(self.spec, *copy.deepcopy((self.prompt, self.extras, self.env_config)))


@dataclass(slots=True)
class Episode:
    """One episode as it was played."""

    env_class: type = object
    outputs: list[BaseTextEnvStepOutput] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    answers: list[Any] = field(default_factory=list)  # of all methods but `close`
    read: list[str] = field(default_factory=list)  # what training reads of them, as it stood when they came
    seconds: float = 0.0  # of its slowest call

    @property
    def is_done(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.outputs) and bool(self.outputs[-1]["done"])


Player = Generator[Call, Outcome, Episode]
"""Plays an episode: it says which call is the next, and is sent what became of it."""


def play_all(players: Sequence[Player], executor: Executor, at_once: bool = False) -> list[Episode]:
    """Play episodes side by side, a call of each in turn; with `at_once`, these calls run at the same time.

    Raises:
        Broken: an episode broke a rule; the others have been played to their end.
        Hang: a call does not come back; the others have been left.
    """
    episodes: dict[int, Episode] = {}
    broken: list[Broken] = []
    calls = {i: next(player) for i, player in enumerate(players)}
    while calls:
        groups = [list(calls)] if at_once else [[i] for i in calls]
        for group in groups:
            outcomes = executor.run([calls.pop(i) for i in group])
            for i, outcome in zip(group, outcomes, strict=True):
                try:
                    calls[i] = players[i].send(outcome)
                except StopIteration as end:
                    episodes[i] = end.value
                except Hang:
                    raise
                except Broken as error:
                    broken.append(error)
    if broken:
        raise broken[0]
    return [episodes[i] for i in range(len(players))]


def play_episode(task: Task, replies: Sequence[str]) -> Player:
    """An episode with these replies, by name, ended earlier if the environment says done. It is closed, twice.

    Raises:
        Broken: something went wrong. The environment has been closed.
        Hang: a call does not come back.
    """
    episode = Episode()
    made = Call(partial(make, task.spec, env_config=task.env_config, extras=task.extras))
    env = yield from _answer(episode, made, "the constructor")
    episode.env_class = type(env)
    try:
        yield from _play_turns(env, task.prompt, replies, episode)
    except Hang:
        raise
    except Broken as broken:
        try:
            yield from _answer(episode, _call(env, "close"), "close()")
        except Broken as later:
            raise type(later)(f"{broken}. Then {later}") from broken
        raise
    for where in ("", ", the second time"):
        yield from _answer(episode, _call(env, "close"), "close()", where)
    return episode


def _play_turns(
    env: Any, prompt: ConversationType, replies: Sequence[str], episode: Episode
) -> Generator[Call, Outcome, None]:
    messages = yield from _answer(episode, _call(env, "init", prompt), "init()", "", _readable_prompt)
    episode.read.append(repr(messages))
    for name in replies:
        step = _call(env, "step", REPLIES[name])
        output = yield from _answer(episode, step, "step()", f", for the reply: {name}", _readable_output)
        episode.outputs.append(output)
        episode.read.append(repr((output["observations"], output["reward"], bool(output["done"]))))
        if output["done"]:
            break
    episode.metrics = yield from _answer(episode, _call(env, "get_metrics"), "get_metrics()", "", checked_metrics)
    episode.read.append(repr(episode.metrics))


def _call(env: Any, method: str, *args: Any) -> Call:
    """As training makes it."""
    native = awaited_method(env, method)
    if native is not None:
        return Call(partial(native, *args), is_awaited=True)
    return Call(partial(methodcaller(method, *args), env))


def _answer(
    episode: Episode, call: Call, what: str, where: str = "", check: Callable[[Any], Any] | None = None
) -> Generator[Call, Outcome, Any]:
    """What a call returns. With a check, it is one of the episode's answers."""
    outcome = yield call
    episode.seconds = max(episode.seconds, outcome.seconds)
    if check is None:
        return checked(outcome, what, where, lambda answer: answer)
    answer = checked(outcome, what, where, check)
    episode.answers.append(outcome.value)
    return answer


def checked(outcome: Outcome, what: str, where: str, check: Callable[[Any], T]) -> T:
    """What a call returned, after a check that may raise InvalidAnswer.

    Raises:
        Broken: it raised, or its answer may not be.
        Hang: it did not come back.
    """
    if outcome.hangs_at is not None:
        raise Hang(f"{what} did not come back within {outcome.seconds:g} s{where}. It is in\n{outcome.hangs_at}")
    if outcome.error is not None:
        hint = f"; {OF_THREADS}" if "thread" in str(outcome.error) else ""
        raise Broken(f"{what} raised {_named(outcome.error)}{where}{hint}") from outcome.error
    try:
        return check(outcome.value)
    except InvalidAnswer as error:
        raise Broken(f"{str(error)[:MOST_TOLD]}{where}") from error
    except Exception as error:  # an answer that cannot even be looked at
        raise Broken(f"{what} returned what raises {_named(error)}{where}") from error


def _readable_prompt(answer: Any) -> ConversationType:
    prompt = checked_prompt(answer)
    _check_text(prompt, "init()")
    return prompt


def _readable_output(answer: Any) -> BaseTextEnvStepOutput:
    output = checked_output(answer)
    reward_components(output)
    _check_text([] if output["done"] else output["observations"], "step()")
    return output


def _check_text(messages: ConversationType, where: str) -> None:
    for message in messages:
        if not isinstance(message["content"], str):
            raise InvalidAnswer(
                f"{where} returned a message with content={message['content']!r}; most models read text only"
            )


def _named(error: BaseException) -> str:
    """The error and the line of the environment that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    own = [frame for frame in theirs if not frame.filename.startswith(LIBRARIES)] or theirs
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:MOST_TOLD]}{at}"
