"""The story environment, whose dataset row can make it fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

METHODS = ("make", "init", "step", "get_metrics", "close")


@dataclass
class Journal:
    """A record of the environments of a test."""

    made: list[StoryEnv] = field(default_factory=list)
    closed: list[StoryEnv] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    do: dict[str, Callable[[], object]] = field(default_factory=dict)  # hooks by method, called first

    def open_environments(self) -> list[StoryEnv]:
        return [env for env in self.made if self.closed.count(env) != 1]


class StoryEnv(BaseTextEnv):
    """An environment that asks `n_turns` times to go on; turn k has a reward of k / 4.

    The row may name a method that `fails`, and the values that methods `returns` instead.
    """

    def __init__(self, journal: Journal, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
        super().__init__()
        self.journal = journal
        self.env_config = env_config
        self.extras = extras
        self.replies: list[str] = []
        self.prompt: ConversationType = []
        self._visit("make")
        journal.made.append(self)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        self._visit("init")
        self.prompt = prompt
        return self._answer("init", (prompt, {}))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self._visit("step")
        self.turns += 1
        self.replies.append(action)
        is_over = self.turns == self.extras.get("n_turns", 3)
        observation = {"role": "user", "content": f"And then? ({self.turns} of {self.extras.get('n_turns', 3)})"}
        output = BaseTextEnvStepOutput(
            observations=[] if is_over else [observation], reward=self.turns / 4, done=is_over, metadata={}
        )
        return self._answer("step", output)

    def grade_unfinished(self) -> float | None:
        self._visit("grade_unfinished")
        return self._answer("grade_unfinished", 0.0)

    def get_metrics(self) -> dict[str, Any]:
        self._visit("get_metrics")
        return self._answer("get_metrics", {"turns": self.turns, "n_letters": sum(map(len, self.replies))})

    def close(self) -> None:
        self.journal.closed.append(self)
        self._visit("close")

    def _visit(self, method: str) -> None:
        self.journal.threads.add(threading.current_thread().name)
        if method in self.journal.do:
            self.journal.do[method]()
        if self.extras.get("fails") == method and self.turns >= self.extras.get("fails_after", 0):
            raise RuntimeError(f"no {method} today")

    def _answer(self, method: str, answer: Any) -> Any:
        return self.extras["returns"].get(method, answer) if "returns" in self.extras else answer
