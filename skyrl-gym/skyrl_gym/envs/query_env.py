"""Base class for environments where the model sends tagged queries until it answers."""

from abc import abstractmethod
from typing import Any, ClassVar

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class QueryEnv(BaseTextEnv):
    """An environment that executes one query per turn, and scores all replies after an answer or the last turn.

    A subclass may override `_is_done`, `_get_reward` and `_parse_action`, as in SkyRL. `_parse_action` returns the call
    in a reply.
    """

    answer_tags: ClassVar[tuple[str, str]]
    """Tags around the answer, e.g. ``("<answer>", "</answer>")``."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self.max_turns = max_turns
        self.chat_history: ConversationType = []

    @abstractmethod
    def execute(self, action: str) -> tuple[str, dict[str, Any]]:
        """Execute the query in a reply. Return the observation text and the step's metadata.

        Mistakes in the reply are explained in the observation, not raised.
        """

    @abstractmethod
    def score(self, replies: list[str]) -> float:
        """Return the reward for the model's replies, one string per turn, without the observations."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the query, or score the replies."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        done = self._is_done(action)
        reward = self._get_reward(action, done)
        if done:
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})
        observation, metadata = self.execute(action)
        message = {"role": "user", "content": observation}
        self.chat_history.append(message)
        return BaseTextEnvStepOutput(observations=[message], reward=reward, done=False, metadata=metadata)

    def _is_done(self, action: str) -> bool:
        """Return True if the reply has an answer, or no turns are left."""
        return self.turns >= self.max_turns or all(tag in action for tag in self.answer_tags)

    def _get_reward(self, action: str, done: bool) -> float:
        """Return this turn's reward: 0 until the episode is done, then the score of all replies."""
        if not done:
            return 0.0
        return self.score([message["content"] for message in self.chat_history if message["role"] == "assistant"])

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns."""
        return {"steps": self.turns}
