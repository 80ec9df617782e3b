"""Base class for environments that grade a single reply."""

from abc import abstractmethod
from typing import Any

from skyrl_gym import maths
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

NO_ANSWER = (None, "[INVALID]")  # the text is from the grader of AIME


class SingleTurnEnv(BaseTextEnv):
    """An environment that grades one reply. A subclass may override `_get_reward`, as in SkyRL."""

    def __init__(self, ground_truth: str, grader: maths.Grader) -> None:
        super().__init__()
        self.ground_truth = ground_truth
        self._grader = grader
        self._grade: maths.Grade | None = None
        self._n_undecided = 0

    @abstractmethod
    def score(self, grade: maths.Grade) -> tuple[float, dict[str, Any]]:
        """Return the reward and metadata for a grade."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Grade the reply."""
        self.turns += 1
        reward = self._get_reward(action)
        metadata: dict[str, Any] = {}
        if self._grade is not None:  # None if a subclass has replaced the grader
            metadata = self.score(self._grade)[1] | {"undecided": self._grade.undecided}
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata=metadata)

    def _get_reward(self, action: str) -> float:
        """Return the reward of a reply."""
        self._grade = self._grader(action, self.ground_truth)
        self._n_undecided += self._grade.undecided is not None
        return self.score(self._grade)[0]

    def get_metrics(self) -> dict[str, Any]:
        """Return why the answer is wrong, if it is. With ``math_verify``, also 1 if it could not decide, else 0."""
        metrics: dict[str, Any] = {"undecided": self._n_undecided} if self._grader is maths.grade else {}
        if self._grade is not None and not self._grade.is_correct:
            metrics["failure"] = "no answer" if self._grade.answer in NO_ANSWER else "wrong answer"
        return metrics
