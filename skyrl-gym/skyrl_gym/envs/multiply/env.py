r"""Multiplication with the answer in ``\boxed{…}``: the example of SkyRL's tutorial."""

import re
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.row import NO_ROW, read_answer, read_max_turns
from skyrl_gym.tools.calls import strip_thoughts

MAX_TURNS = 5
FORMAT_REWARD = 0.5

# One scan finds the first non-empty box. It matches unclosed boxes too, to stay linear on a long run of them.
_FIRST_BOX = re.compile(r"\\boxed\{([^}]+)(\})?")


class MultiplyEnv(BaseTextEnv):
    r"""One product, up to `max_turns` replies; the first ``\boxed{…}`` after the thoughts of each counts.

    `extras` is the row: ``reward_spec["ground_truth"]`` is the product, compared as text. With one turn, the default of
    `generator.max_turns`, the reward is 1 if correct, else 0. With several turns, the model gets feedback and tries
    again: a correct answer earns 1 and ends the episode, a wrong boxed answer on the last turn earns 0.5, and all other
    turns earn 0. Without `max_turns`, there are 5 turns. A subclass may override `_parse_action`, `_is_done` and
    `_get_reward`.

    Raises:
        AssertionError: the row has no ground truth.
        ValueError: the ground truth is neither text nor a whole number, or `max_turns` is less than 1.
    """

    validates_rows = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] = NO_ROW) -> None:
        super().__init__()
        self.ground_truth = read_answer(extras)
        self.max_turns = read_max_turns(extras, MAX_TURNS)
        self._answer: str | None = None
        self._is_correct = False
        self._has_ended = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grade the reply, and return feedback unless it is the last turn."""
        if self._has_ended:
            raise RuntimeError(
                f"this episode ended after turn {self.turns}; create a new MultiplyEnv for the next episode"
            )
        self.turns += 1
        self._answer = self._parse_action(action)
        self._is_correct = self._answer is not None and self._answer.strip() == self.ground_truth
        self._has_ended = self._is_done(action)
        wrong = "There is no answer in a box." if self._answer is None else "The answer in the box is wrong. Try again."
        feedback = {"role": "user", "content": f"{wrong} Put your final answer in \\boxed{{}}."}
        return BaseTextEnvStepOutput(
            observations=[] if self._has_ended else [feedback],
            reward=self._get_reward(action, self._has_ended),
            done=self._has_ended,
            metadata={"parsed_answer": self._answer},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns, 1 if the answer was found, and otherwise what was wrong with the last reply."""
        metrics: dict[str, Any] = {"steps": self.turns, "correct": int(self._is_correct)}
        failure = "no answer in a box" if self._answer is None else "wrong answer"
        return metrics if self._is_correct else metrics | {"failure": failure}

    def _parse_action(self, action: str) -> str | None:
        """Return the answer in a reply, or None if there is none."""
        box = _FIRST_BOX.search(strip_thoughts(action))
        return box[1] if box and box[2] else None

    def _is_done(self, action: str) -> bool:
        """Return True if the answer is right, or no turns are left."""
        return self._is_correct or self.turns >= self.max_turns

    def _get_reward(self, action: str, done: bool) -> float:
        """Return the reward of this turn."""
        if self._is_correct:
            return 1.0
        has_format_reward = done and self.max_turns > 1 and self._answer is not None
        return FORMAT_REWARD if has_format_reward else 0.0
