r"""Multiply two numbers: the example of SkyRL's tutorial, whose answer stands in ``\boxed{…}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.row import answer_of, max_turns_of

MAX_TURNS = 5
FORMAT_REWARD = 0.5

# One scan finds the first box that is not empty. That it need not be closed keeps a long row of open ones linear.
_FIRST_BOX = re.compile(r"\\boxed\{([^}]+)(\})?")


class MultiplyEnv(BaseTextEnv):
    r"""One product, up to `max_turns` replies; the first ``\boxed{…}`` of each counts.

    `extras` is the row: ``reward_spec["ground_truth"]`` is the product, compared as text. With one turn, which is what
    the trainer allows unless `generator.max_turns` says more, a reply is worth 1 when it is right and 0 when it is not.
    With several, the model is told what is wrong and tries again: a right answer is worth 1 and ends the episode, a
    wrong one in a box on the last turn 0.5, and all else 0. An environment made without `max_turns` allows 5 turns.

    Raises:
        AssertionError, ValueError: the row has no ground truth, or one of a strange kind; `max_turns` is less than 1.
    """

    def __init__(self, env_config: Mapping[str, Any] | None, extras: Mapping[str, Any]) -> None:
        super().__init__()
        self.ground_truth = answer_of(extras)
        self.max_turns = max_turns_of(extras, MAX_TURNS)
        self._is_correct = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Judge the reply, and say what is wrong unless it was the last."""
        if self._is_done:
            raise RuntimeError(f"this episode ended after turn {self.turns}; make a new MultiplyEnv for the next one")
        self.turns += 1
        answer = self._parse_action(action)
        self._is_correct = answer is not None and answer.strip() == self.ground_truth
        return BaseTextEnvStepOutput(
            observations=[] if self._is_done else [_feedback(answer)],
            reward=self._reward(answer),
            done=self._is_done,
            metadata={"parsed_answer": answer},
        )

    def get_metrics(self) -> dict[str, Any]:
        """Turns played, and 1 if the answer was found."""
        return {"steps": self.turns, "correct": int(self._is_correct)}

    @property
    def _is_done(self) -> bool:
        return self._is_correct or self.turns >= self.max_turns

    def _parse_action(self, action: str) -> str | None:
        box = _FIRST_BOX.search(action)
        return box[1] if box and box[2] else None

    def _reward(self, answer: str | None) -> float:
        if self._is_correct:
            return 1.0
        is_consoled = self._is_done and self.max_turns > 1 and answer is not None
        return FORMAT_REWARD if is_consoled else 0.0


def _feedback(answer: str | None) -> dict[str, Any]:
    wrong = "There is no answer in a box." if answer is None else "The answer in the box is wrong. Try again."
    return {"role": "user", "content": f"{wrong} Put your final answer in \\boxed{{}}."}
