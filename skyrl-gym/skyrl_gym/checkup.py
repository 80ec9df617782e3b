"""Drives an environment, without a model, through what training will do to it, and says which rules it breaks.

skyrl env check my_module:MyEnv --data train.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.episode import REPLIES, Broken, Episode, Hang, Player, Task, checked, play_all, play_episode
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.executor import Call, Executor
from skyrl_gym.leftovers import n_held
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.serialization import plain

TIMEOUT_SECONDS = 60.0
SLOW_SECONDS = 5.0

MEETING: Mapping[bool, str] = {
    False: (
        "episodes that took turns came out otherwise than alone: they share something that each of them changes; keep "
        "it in the instance"
    ),
    True: (
        "episodes whose calls ran at the same time came out otherwise than alone: one changes what another is using; "
        "keep it in the instance, or hold a lock"
    ),
}
"""What is wrong with episodes that meet, by whether only calls at the same time do."""

Verdict = Literal["kept", "broken", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one rule."""

    rule: str
    verdict: Verdict
    told: str = ""


class Checkup:
    """Plays an environment on a dataset row. Each rule is checked once; the first that is broken ends its check.

    Calls are made as training makes them: in threads other than the main one, or awaited in one event loop.
    """

    def __init__(
        self,
        spec: EnvSpec,
        row: Mapping[str, Any],
        env_config: Mapping[str, Any] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """A call that takes longer than `timeout_seconds` ends the whole check.

        Raises:
            ValueError: training would not take the row.
        """
        self._task = Task.of(spec, row, env_config or {})
        self._executor = Executor(len(REPLIES) + 1, timeout_seconds)
        self._episodes: dict[str, Episode] = {}

    @property
    def is_stuck(self) -> bool:
        """Whether a call hangs. A thread that hangs cannot be ended, and is left behind."""
        return self._executor.is_stuck

    def run(self) -> Iterator[Finding]:
        """A finding for each rule, in the order of `RULES`, as it is made.

        None follows after one that has no environment to be checked with, or where a call hangs.
        """
        with self._executor:
            for rule, check in RULES.items():
                finding = self._finding(rule, check)
                yield finding
                if self.is_stuck or (check is Checkup.can_be_made and finding.verdict == "broken"):
                    return

    def _finding(self, rule: str, check: Callable[[Checkup], str | None]) -> Finding:
        try:
            advice = check(self)
            if self._executor.was_stopped:
                raise Broken("it stopped the event loop, in which the trainer and all other environments run")
        except Hang as hang:
            return Finding(rule, "broken", f"{hang}\nThe check ends here: the rules after this one would hang too")
        except Broken as broken:
            return Finding(rule, "broken", str(broken))
        return Finding(rule, "kept") if advice is None else Finding(rule, "advice", advice)

    # -- rules: each raises Broken, or returns advice, or None

    def can_be_made(self) -> str | None:
        """It is made from a row, and answers `init`."""
        play_all([play_episode(self._task.copy(), [])], self._executor)
        return None

    def takes_any_reply(self) -> str | None:
        """No reply makes it raise: what a model writes is judged."""
        for name in REPLIES:
            self._episode(name)
        return None

    def ends_in_time(self) -> str | None:
        """It says done by the last turn: a reward that comes later never comes."""
        for name in REPLIES:
            if not self._episode(name).is_done:
                return (
                    f"it was not done after {self._task.max_turns} turns (extras['max_turns']) of the reply: {name}. "
                    "The trainer ends the episode there; score it at the last turn"
                )
        return None

    def is_silent_when_done(self) -> str | None:
        """Nobody reads the observations of the last turn."""
        for name in REPLIES:
            last = self._episode(name).outputs[-1]
            if last["done"] and last["observations"]:
                return "step() returned observations with done=True; the model never reads them. Return []"
        return None

    def leaves_its_row_alone(self) -> str | None:
        """Rows are shared by all samples of a prompt."""
        task = self._task.copy()
        play_all([play_episode(task, ["words"] * task.max_turns)], self._executor)
        if task.prompt != self._task.prompt:
            raise Broken("it changed the messages that init() was given; copy them first")
        if task.extras != self._task.extras:
            raise Broken("it changed extras, which all episodes of the row share; copy what it changes")
        return None

    def plays_beside_itself(self) -> str | None:
        """Episodes that are played in turns, and those that are played at the same time, do not meet."""
        alone = _read([self._episode(name) for name in REPLIES])
        for at_once, told in MEETING.items():
            if self._together(at_once) == alone:
                continue
            again = _read([self._played(name) for name in REPLIES])
            if again == alone and self._together(at_once) != alone:  # so that it is not random
                raise Broken(told)
            return "episodes side by side came out otherwise than alone: it is random, or they share something"
        return None

    def is_repeatable(self) -> str | None:
        """The same replies come to the same."""
        if self._played("words").read != self._played("words").read:
            return "two episodes with the same replies came out differently; take randomness from a seed in the row"
        return None

    def reports_numbers(self) -> str | None:
        """Metrics can be averaged over episodes."""
        episodes = [self._episode(name) for name in REPLIES]
        reported = [episode.metrics for episode in episodes if episode.metrics]  # others are not aggregated
        if reported:
            aggregate = getattr(episodes[0].env_class, "aggregate_metrics", default_aggregate_metrics)
            (outcome,) = self._executor.run([Call(partial(aggregate, reported))])
            checked(outcome, "aggregate_metrics()", "", _checked_aggregate)
        return None

    def is_quick(self) -> str | None:
        """No call takes seconds."""
        slowest = max((self._episode(name).seconds, name) for name in REPLIES)
        if slowest[0] > SLOW_SECONDS:
            return f"a call took {slowest[0]:.1f} s, for the reply: {slowest[1]}"
        return None

    def can_cross_processes(self) -> str | None:
        """What it answers has JSON, which `environment.skyrl_gym.isolation=process` needs."""
        try:
            json.dumps(self._episode("words").answers, default=plain)
        except (TypeError, ValueError) as error:
            return f"what it answers has no JSON ({error}), so it cannot run in a process of its own"
        return None

    def leaves_nothing(self) -> str | None:
        """Threads, files and processes end with `close`."""
        self._played("words")  # what is opened once, is open now
        before = n_held()
        for _ in range(3):
            self._played("words")
        after = n_held()
        grown = [f"{after[name] - n} {name}" for name, n in before.items() if after[name] >= n + 3]
        return f"three episodes left {', '.join(grown)} behind" if grown else None

    # -- playing

    def _episode(self, name: str) -> Episode:
        """The episode in which every reply is this one. It is played once for all rules."""
        if name not in self._episodes:
            self._episodes[name] = self._played(name)
        return self._episodes[name]

    def _played(self, name: str) -> Episode:
        """Another such episode."""
        (episode,) = play_all([self._player(name)], self._executor)
        return episode

    def _together(self, at_once: bool) -> list[list[str]]:
        """What is read in episodes beside each other, one of each reply."""
        try:
            return _read(play_all([self._player(name) for name in REPLIES], self._executor, at_once))
        except Broken as broken:
            told = ", with calls at the same time" if at_once else ""
            raise type(broken)(f"beside other episodes{told}: {broken}") from broken

    def _player(self, name: str) -> Player:
        return play_episode(self._task.copy(), [name] * self._task.max_turns)


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


def _read(episodes: Sequence[Episode]) -> list[list[str]]:
    return [episode.read for episode in episodes]


def _checked_aggregate(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise InvalidAnswer(f"aggregate_metrics() returned {answer!r}; return a dict")
    return answer
