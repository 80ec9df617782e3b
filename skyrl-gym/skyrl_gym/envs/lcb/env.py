"""Programming tasks: one reply, whose last code block must pass all tests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.lcb.grading import Verdict, extract_code, grade, limits_per_test, parse_tests
from skyrl_gym.envs.row import NO_ROW, parse_settings, read_ground_truth
from skyrl_gym.error import InvalidSettings
from skyrl_gym.isolation.program import Isolation, level_for


@dataclass(frozen=True)
class LCBEnvConfig:
    """`environment.skyrl_gym.lcb`."""

    timeout: float = 6.0
    """CPU seconds allowed per test. The wall time limit is four times as long."""
    total_timeout: float = 120.0
    """CPU seconds allowed for all tests of a task together. A slower program counts as wrong."""
    memory_mb: int = 1024
    isolation: Isolation = "best"
    """Isolation of programs. `best` raises where the machine cannot keep programs from the user's files and processes,
    `namespaces` where it has no namespaces. `limits` runs programs anyway, within limits on time and memory."""

    def __post_init__(self) -> None:
        for name in ("timeout", "total_timeout", "memory_mb"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise InvalidSettings(f"environment.skyrl_gym.lcb.{name}={value!r} must be a positive number")


class LCBEnv(BaseTextEnv):
    """The reward is 1 if the program in the reply passes all tests in `reward_spec["ground_truth"]`, else 0.

    Programs run in `skyrl_gym.isolation`. `metadata` has `parsed_code` and `failure`, the kind of failure.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        self._settings = parse_settings("lcb", env_config, LCBEnvConfig)
        self.tests = parse_tests(read_ground_truth(extras))
        self._level = level_for(self._settings.isolation)
        self._verdict = Verdict(0, len(self.tests), "none")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the program on the tests."""
        self.turns += 1
        reward = self._get_reward(action)
        metadata = {"parsed_code": extract_code(action), "failure": self._verdict.failure}
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)

    def _get_reward(self, action: str) -> float:
        """Return the reward of a reply. A subclass may override it, as in SkyRL."""
        code = extract_code(action)
        if code is not None:
            limits = limits_per_test(self._settings.timeout, self._settings.memory_mb << 20, self.tests)
            self._verdict = grade(code, self.tests, limits, self._settings.total_timeout, self._level)
        return float(self._verdict.is_correct)

    def get_metrics(self) -> dict[str, Any]:
        """Return the fraction of passed tests, flags for replies with code and for programs at a limit, the failure."""
        failure = self._verdict.failure
        texts = {"none": "no program", "wrong": "wrong output", "error": "program raised an error"}
        reason = {} if failure is None else {"failure": texts.get(failure, f"program exceeded its {failure}")}
        return reason | {
            "passed_tests": self._verdict.n_passed / self._verdict.n_tests,
            "has_code": failure != "none",
            "met_limit": failure not in (None, "none", "wrong", "error"),
        }
