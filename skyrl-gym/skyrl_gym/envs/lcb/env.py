"""A programming task: one reply, whose last block of code must pass all tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.lcb.grading import Verdict, extract_code, grade, limits_of, read_tests
from skyrl_gym.envs.row import ground_truth_of, settings_of
from skyrl_gym.isolation.program import Demand, level_for


@dataclass(frozen=True)
class LCBEnvConfig:
    """`environment.skyrl_gym.lcb`."""

    timeout: float = 6.0
    """Seconds that a program may compute for one test. A busy machine may take four times as long."""
    total_timeout: float = 120.0
    """The same, for all tests of a task; what takes longer is wrong."""
    memory_mb: int = 1024
    isolation: Demand = "best"
    """`namespaces` refuses to run on a machine that cannot close programs off."""

    def __post_init__(self) -> None:
        for name in ("timeout", "total_timeout", "memory_mb"):
            value = getattr(self, name)
            if value <= 0:
                raise ValueError(f"environment.skyrl_gym.lcb.{name}={value!r} must be a positive number")


class LCBEnv(BaseTextEnv):
    """1 if the program in the reply passes all tests in `reward_spec["ground_truth"]`, else 0.

    Programs run closed off: see `skyrl_gym.isolation`. `metadata` has `parsed_code`, and how the program failed.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = settings_of("lcb", env_config, LCBEnvConfig)
        self.tests = read_tests(ground_truth_of(extras))
        self._level = level_for(self._settings.isolation)
        self._verdict = Verdict(0, len(self.tests), "none")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the program."""
        self.turns += 1
        code = extract_code(action)
        if code is not None:
            limits = limits_of(self._settings.timeout, self._settings.memory_mb << 20)
            self._verdict = grade(code, self.tests, limits, self._settings.total_timeout, self._level)
        return BaseTextEnvStepOutput(
            observations=[],
            reward=float(self._verdict.is_correct),
            done=True,
            metadata={"parsed_code": code, "failure": self._verdict.failure},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Which part of the tests it passed, and whether there was a program, and whether that met a limit."""
        failure = self._verdict.failure
        return {
            "passed_tests": self._verdict.n_passed / self._verdict.n_tests,
            "has_code": failure != "none",
            "met_limit": failure not in (None, "none", "wrong", "error"),
        }
