"""Drives an environment, without a model, through what training will do to it, and says which rules it breaks.

skyrl env check my_module:MyEnv --data train.jsonl
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skyrl_gym.contract import checked_metrics, checked_output, checked_prompt, reward_components
from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_gym.envs.registration import EnvSpec, make
from skyrl_gym.worker import EnvConfig, plain

MAX_TURNS = 10  # where a row does not say
SLOW_SECONDS = 5.0
MOST_CHARS = 1_000_000

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

Verdict = Literal["kept", "broken", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one rule."""

    rule: str
    verdict: Verdict
    told: str = ""


@dataclass(slots=True)
class Episode:
    """One episode as it was played."""

    prompt: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[BaseTextEnvStepOutput] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # of its slowest call

    @property
    def is_done(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.outputs) and bool(self.outputs[-1]["done"])

    def summary(self) -> list[Any]:
        """What another episode with the same replies should come to."""
        told = [(output["observations"], output["reward"], bool(output["done"])) for output in self.outputs]
        return [self.prompt, told, self.metrics]


class Broken(Exception):
    """A rule is broken; the text says how."""


class Checkup:
    """Plays an environment on a dataset row. Each rule is checked once; the first that is broken ends its check."""

    def __init__(self, spec: EnvSpec, row: Mapping[str, Any], env_config: Mapping[str, Any] | None = None) -> None:
        self._spec = spec
        self._prompt = row.get("prompt") or [{"role": "user", "content": "Begin."}]
        extras = {name: value for name, value in row.items() if name not in ("prompt", "env_class")}
        self._extras = {"max_turns": MAX_TURNS} | extras
        self._env_config = json.loads(json.dumps(dict(env_config or {}), default=plain), object_hook=EnvConfig)
        self._runner: asyncio.Runner | None = None

    def run(self) -> Iterator[Finding]:
        """A finding for each rule, in the order of `RULES`, as it is made; without an environment, the first alone."""
        with asyncio.Runner() as self._runner:
            for rule, check in RULES.items():
                finding = self._finding(rule, check)
                yield finding
                if check is Checkup.can_be_made and finding.verdict == "broken":
                    return

    def _finding(self, rule: str, check: Callable[[Checkup], str | None]) -> Finding:
        try:
            advice = check(self)
        except Broken as broken:
            return Finding(rule, "broken", str(broken))
        return Finding(rule, "kept") if advice is None else Finding(rule, "advice", advice)

    # -- rules: each raises Broken, or returns advice, or None

    def can_be_made(self) -> str | None:
        """It is made from a row, and answers `init`."""
        self._played([])
        return None

    def takes_any_reply(self) -> str | None:
        """No reply makes it raise: what a model writes is judged."""
        for name in REPLIES:
            self._played([name] * self._n_turns)
        return None

    def is_quick(self) -> str | None:
        """No call takes seconds."""
        slowest = max((self._played([name] * self._n_turns).seconds, name) for name in REPLIES)
        if slowest[0] > SLOW_SECONDS:
            return f"a call took {slowest[0]:.1f} s, for the reply: {slowest[1]}"
        return None

    def ends_in_time(self) -> str | None:
        """It says done by the last turn: a reward that comes later never comes."""
        for name in REPLIES:
            if not self._played([name] * self._n_turns).is_done:
                return (
                    f"it was not done after {self._n_turns} turns (extras['max_turns']) of the reply: {name}. The "
                    "trainer ends the episode there; score it at the last turn"
                )
        return None

    def is_silent_when_done(self) -> str | None:
        """Nobody reads the observations of the last turn."""
        for name in REPLIES:
            last = self._played([name] * self._n_turns).outputs[-1]
            if last["done"] and last["observations"]:
                return "step() returned observations with done=True; the model never reads them. Return []"
        return None

    def leaves_its_row_alone(self) -> str | None:
        """Rows are shared by all samples of a prompt."""
        prompt, extras = copy.deepcopy((self._prompt, self._extras))
        self._played(["words"] * self._n_turns, given=(prompt, extras))
        if prompt != self._prompt:
            raise Broken("it changed the messages that init() was given; copy them first")
        if extras != self._extras:
            raise Broken("it changed extras, which all episodes of the row share; copy what it changes")
        return None

    def plays_beside_itself(self) -> str | None:
        """Episodes that are played at the same time do not meet."""
        names = list(REPLIES)[:4]
        alone = [self._played([name] * self._n_turns).summary() for name in names]
        together = self._interleaved(names)
        if _as_text(together) != _as_text(alone):
            return "episodes side by side came out otherwise than alone: it is random, or they share something"
        return None

    def is_repeatable(self) -> str | None:
        """The same replies come to the same."""
        first, again = (self._played(["words"] * self._n_turns).summary() for _ in range(2))
        if _as_text(first) != _as_text(again):
            return "two episodes with the same replies came out differently; take randomness from a seed in the row"
        return None

    def reports_numbers(self) -> str | None:
        """Metrics can be averaged over episodes."""
        metrics = [self._played([name] * self._n_turns).metrics for name in REPLIES]
        cls = type(self._made(self._extras))
        try:
            aggregated = cls.aggregate_metrics(metrics)
        except Exception as error:
            raise Broken(f"aggregate_metrics() raised {_named(error)}") from error
        if not isinstance(aggregated, Mapping):
            raise Broken(f"aggregate_metrics() returned {aggregated!r}; return a dict")
        return None

    def can_cross_processes(self) -> str | None:
        """What it answers has JSON, which `environment.skyrl_gym.isolation=process` needs."""
        try:
            json.dumps(self._played(["words"] * self._n_turns).summary(), default=plain)
            json.dumps([output.get("metadata") for output in self._played(["words"]).outputs], default=plain)
        except (TypeError, ValueError) as error:
            return f"what it answers has no JSON ({error}), so it cannot run in a process of its own"
        return None

    def leaves_nothing(self) -> str | None:
        """Threads, files and processes end with `close`."""
        self._played(["words"] * self._n_turns)  # what is opened once, is open now
        before = _held()
        for _ in range(3):
            self._played(["words"] * self._n_turns)
        after = _held()
        grown = [f"{after[name] - n} {name}" for name, n in before.items() if after[name] >= n + 3]
        return f"three episodes left {', '.join(grown)} behind" if grown else None

    # -- playing

    @property
    def _n_turns(self) -> int:
        return int(self._extras["max_turns"])

    def _played(self, replies: Sequence[str], given: tuple[Any, Any] | None = None) -> Episode:
        """An episode with these replies, by name, ended earlier if the environment says done."""
        episode = Episode()
        for _ in self._steps(replies, episode, given or copy.deepcopy((self._prompt, self._extras))):
            pass
        return episode

    def _interleaved(self, names: Sequence[str]) -> list[Any]:
        episodes = [Episode() for _ in names]
        players = [
            self._steps([name] * self._n_turns, episode, copy.deepcopy((self._prompt, self._extras)))
            for name, episode in zip(names, episodes, strict=True)
        ]
        while players:
            players = [player for player in players if next(player, self) is None]
        return [episode.summary() for episode in episodes]

    def _steps(self, replies: Sequence[str], episode: Episode, given: tuple[Any, Any]) -> Iterator[None]:
        """Play into `episode`, pausing after each call."""
        prompt, extras = given
        env = self._made(extras)
        try:
            episode.prompt = self._call(episode, env, "init", checked_prompt, "", prompt)
            _check_text(episode.prompt, "init()")
            yield
            for name in replies:
                output = self._call(episode, env, "step", checked_output, f", for the reply: {name}", REPLIES[name])
                with _broken("step"):
                    reward_components(output)
                _check_text([] if output["done"] else output["observations"], "step()")
                episode.outputs.append(output)
                yield
                if output["done"]:
                    break
            episode.metrics = self._call(episode, env, "get_metrics", checked_metrics, "")
        finally:
            if not isinstance(sys.exc_info()[1], Broken):  # or it would be told in place of what was broken first
                for where in ("", ", the second time"):
                    self._call(episode, env, "close", lambda answer: answer, where)

    def _made(self, extras: Any) -> Any:
        with _broken("the constructor"):
            return make(self._spec, env_config=copy.deepcopy(self._env_config), extras=extras)

    def _call(
        self, episode: Episode, env: Any, method: str, check: Callable[[Any], Any], where: str, *args: Any
    ) -> Any:
        """What a method answers, checked; `…_async` comes first, as in training."""
        started = time.monotonic()
        native = getattr(env, f"{method}_async", None)
        with _broken(f"{method}()", where):
            if inspect.iscoroutinefunction(native):
                assert self._runner is not None
                answer = self._runner.run(native(*args))
            else:
                answer = getattr(env, method)(*args)
            checked = check(answer)
        episode.seconds = max(episode.seconds, time.monotonic() - started)
        return checked


RULES: Mapping[str, Callable[[Checkup], str | None]] = {
    "can be made and begun": Checkup.can_be_made,
    "takes any reply": Checkup.takes_any_reply,
    "ends by its last turn": Checkup.ends_in_time,
    "says nothing when it is done": Checkup.is_silent_when_done,
    "leaves its dataset row alone": Checkup.leaves_its_row_alone,
    "plays beside itself": Checkup.plays_beside_itself,
    "comes to the same again": Checkup.is_repeatable,
    "reports numbers": Checkup.reports_numbers,
    "answers quickly": Checkup.is_quick,
    "can have a process of its own": Checkup.can_cross_processes,
    "leaves nothing behind": Checkup.leaves_nothing,
}


class _broken:
    """What an environment raises breaks a rule; the text says where it was raised."""

    def __init__(self, what: str, where: str = "") -> None:
        self._what = what
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, Broken):
            raise Broken(f"{self._what} raised {_named(error)}{self._where}") from error


def _check_text(messages: Sequence[Mapping[str, Any]], where: str) -> None:
    for message in messages:
        if not isinstance(message["content"], str):
            raise Broken(f"{where} returned a message with content={message['content']!r}; most models read text only")


def _named(error: Exception) -> str:
    """The error and the line of the environment that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    at = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:500]}{at}"


def _as_text(value: Any) -> str:
    return json.dumps(value, default=repr, sort_keys=True)


def _held() -> dict[str, int]:
    """What this process has open."""
    held = {"threads": threading.active_count()}
    for folder, name in (("/proc/self/fd", "open files"), (f"/proc/self/task/{os.getpid()}/children", "processes")):
        if os.path.isdir(folder):
            held[name] = len(os.listdir(folder))
        elif os.path.isfile(folder):
            held[name] = len(Path(folder).read_text().split())
    return held
