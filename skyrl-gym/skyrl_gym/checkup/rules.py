"""Check, without a model, that an environment follows the rules of training, and report the rules that it breaks.

skyrl env check my_module:MyEnv --data train.jsonl
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from skyrl_gym.checkup.episode import (
    REPLIES,
    EpisodeSpec,
    Hang,
    Player,
    RecordedEpisode,
    RuleViolation,
    play_all,
    play_episode,
    validate_result,
)
from skyrl_gym.checkup.executor import EnvCall, Executor
from skyrl_gym.checkup.resources import count_resources
from skyrl_gym.envs.registration import EnvSpec
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.metrics import default_aggregate_metrics
from skyrl_gym.runtime.serialization import to_json_value

TIMEOUT_SECONDS = 60.0
SLOW_SECONDS = 5.0

INTERFERENCE: Mapping[bool, str] = {
    False: (
        "interleaved episodes had different results than a single one, because they change shared state. Keep it in "
        "the instance"
    ),
    True: (
        "episodes with concurrent calls had different results than a single one, because one call changes state while "
        "another uses it. Keep the state in the instance, or hold a lock"
    ),
}
"""Problem of episodes that interfere with each other. The key is True if only concurrent calls interfere."""

Verdict = Literal["passed", "failed", "advice"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a rule."""

    rule: str
    verdict: Verdict
    detail: str = ""


class Checkup:
    """A check of one environment on one dataset row. Each rule reports only its first violation.

    Calls are made as in training: outside the main thread, or awaited in one event loop.
    """

    def __init__(
        self,
        spec: EnvSpec,
        row: Mapping[str, Any],
        env_config: Mapping[str, Any] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Create a check. Any call that takes longer than `timeout_seconds` ends it.

        Raises:
            ValueError: training would reject the row.
        """
        self._task = EpisodeSpec.from_row(spec, row, env_config or {})
        self._executor = Executor(len(REPLIES) + 1, timeout_seconds)
        self._episodes: dict[str, RecordedEpisode] = {}

    @property
    def is_stuck(self) -> bool:
        """True if a call hangs. Its thread cannot be ended and is left behind."""
        return self._executor.is_stuck

    @property
    def image_sizes(self) -> Counter[str]:
        """Number of images by size, e.g. {"640 x 480": 88}, in one episode for each of `REPLIES`."""
        images = [image for episode in self._episodes.values() for image in episode.images]
        return Counter(f"{image.width} x {image.height}" for image in images)

    def run(self) -> Iterator[Finding]:
        """Yield a finding for each rule, in the order of `RULES`, as soon as it is known.

        Stop after the first rule if the environment cannot be constructed, and after any rule if a call hangs.
        """
        with self._executor:
            for rule, check in RULES.items():
                finding = self._check_rule(rule, check)
                yield finding
                if self.is_stuck or (check is Checkup.can_be_constructed and finding.verdict == "failed"):
                    return

    def _check_rule(self, rule: str, check: Callable[[Checkup], str | None]) -> Finding:
        try:
            advice = check(self)
            if self._executor.was_stopped:
                raise RuleViolation("it stopped the event loop, in which the trainer and all other environments run")
        except Hang as hang:
            return Finding(rule, "failed", f"{hang}\nThe remaining rules were skipped, because they would hang too")
        except RuleViolation as violation:
            return Finding(rule, "failed", str(violation))
        return Finding(rule, "passed") if advice is None else Finding(rule, "advice", advice)

    # -- rules: each raises RuleViolation, or returns advice or None

    def can_be_constructed(self) -> str | None:
        """Check that the environment can be constructed from a row, and that `init` works."""
        play_all([play_episode(self._task.copy(), [])], self._executor)
        return None

    def accepts_any_reply(self) -> str | None:
        """Check that no reply raises: anything a model may write must be scored."""
        for name in REPLIES:
            self._episode(name)
        return None

    def ends_in_time(self) -> str | None:
        """Check that the last turn is done: training never asks for a later reward."""
        for name in REPLIES:
            if not self._episode(name).is_done:
                return (
                    f"it was not done after {self._task.max_turns} turns (extras['max_turns']) of the reply: {name}. "
                    "The trainer ends the episode there; score it at the last turn"
                )
        return None

    def is_silent_when_done(self) -> str | None:
        """Check that the last turn has no observations: the model would never read them."""
        for name in REPLIES:
            last = self._episode(name).outputs[-1]
            if last["done"] and last["observations"]:
                return "step() returned observations with done=True; the model never reads them. Return []"
        return None

    def keeps_its_row(self) -> str | None:
        """Check that the row is not modified, since all samples of a prompt share it."""
        task = self._task.copy()
        play_all([play_episode(task, ["plain text"] * task.max_turns)], self._executor)
        if task.prompt != self._task.prompt:
            raise RuleViolation("it modified the messages passed to init(); copy them first")
        if task.extras != self._task.extras:
            raise RuleViolation("it modified extras, which all episodes of the row share; copy what it modifies")
        return None

    def isolates_episodes(self) -> str | None:
        """Check that interleaved episodes, and episodes with concurrent calls, do not affect each other."""
        alone = _trained_values([self._episode(name) for name in REPLIES])
        for concurrent, problem in INTERFERENCE.items():
            if self._play_together(concurrent) == alone:
                continue
            again = _trained_values([self._play(name) for name in REPLIES])
            if again == alone and self._play_together(concurrent) != alone:  # rules out a random environment
                raise RuleViolation(problem)
            return "episodes had different results together than alone: they are random, or they share state"
        return None

    def is_deterministic(self) -> str | None:
        """Check that the same replies have the same results."""
        if self._play("plain text").trained_values != self._play("plain text").trained_values:
            return "two episodes with the same replies had different results; seed randomness from the row"
        return None

    def reports_numbers(self) -> str | None:
        """Check that metrics can be averaged over episodes."""
        episodes = [self._episode(name) for name in REPLIES]
        reported = [episode.metrics for episode in episodes if episode.metrics]  # other episodes are not aggregated
        if reported:
            aggregate = getattr(episodes[0].env_class, "aggregate_metrics", default_aggregate_metrics)
            (result,) = self._executor.run([EnvCall(partial(aggregate, reported))])
            validate_result(result, "aggregate_metrics()", "", _validate_aggregate)
        return None

    def is_quick(self) -> str | None:
        """Check that no call takes seconds."""
        slowest = max((self._episode(name).seconds, name) for name in REPLIES)
        if slowest[0] > SLOW_SECONDS:
            return f"a call took {slowest[0]:.1f} s, for the reply: {slowest[1]}"
        return None

    def can_cross_processes(self) -> str | None:
        """Check that return values can be written as JSON. `environment.skyrl_gym.isolation=process` needs that."""
        try:
            json.dumps(self._episode("plain text").answers, default=to_json_value)
        except (TypeError, ValueError) as error:
            return f"its return values cannot be written as JSON ({error}), so it cannot run in a separate process"
        return None

    def releases_resources(self) -> str | None:
        """Check that threads, files and processes end with `close`."""
        self._play("plain text")  # opens whatever is opened only once
        before = count_resources()
        for _ in range(3):
            self._play("plain text")
        after = count_resources()
        leaked = [f"{after[name] - n} {name}" for name, n in before.items() if after[name] >= n + 3]
        return f"three episodes leaked {', '.join(leaked)}" if leaked else None

    # -- playing

    def _episode(self, name: str) -> RecordedEpisode:
        """Return the episode whose replies are all `name`. It is played once for all rules."""
        if name not in self._episodes:
            self._episodes[name] = self._play(name)
        return self._episodes[name]

    def _play(self, name: str) -> RecordedEpisode:
        """Play a new episode whose replies are all `name`."""
        (episode,) = play_all([self._player(name)], self._executor)
        return episode

    def _play_together(self, concurrent: bool) -> list[list[str]]:
        """Play one episode per reply, all together."""
        try:
            return _trained_values(play_all([self._player(name) for name in REPLIES], self._executor, concurrent))
        except RuleViolation as violation:
            how = " with concurrent calls" if concurrent else ""
            raise type(violation)(f"among other episodes{how}: {violation}") from violation

    def _player(self, name: str) -> Player:
        return play_episode(self._task.copy(), [name] * self._task.max_turns)


RULES: Mapping[str, Callable[[Checkup], str | None]] = {
    "can be constructed and initialized": Checkup.can_be_constructed,
    "accepts any reply": Checkup.accepts_any_reply,
    "ends by its last turn": Checkup.ends_in_time,
    "returns no observations when done": Checkup.is_silent_when_done,
    "does not modify its dataset row": Checkup.keeps_its_row,
    "isolates its episodes": Checkup.isolates_episodes,
    "is deterministic": Checkup.is_deterministic,
    "reports numeric metrics": Checkup.reports_numbers,
    "answers quickly": Checkup.is_quick,
    "can run in a separate process": Checkup.can_cross_processes,
    "releases its resources": Checkup.releases_resources,
}


def _trained_values(episodes: Sequence[RecordedEpisode]) -> list[list[str]]:
    return [episode.trained_values for episode in episodes]


def _validate_aggregate(answer: Any) -> Mapping[str, Any]:
    if not isinstance(answer, Mapping):
        raise InvalidAnswer(f"aggregate_metrics() returned {answer!r}; return a dict")
    return answer
