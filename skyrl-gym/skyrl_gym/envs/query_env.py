"""Episodes in which the model sends a query each turn, in a format of tags, until it answers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class QueryEnv(BaseTextEnv):
    """An environment that executes a query each turn, and scores all replies after an answer or the last turn."""

    answer_tags: ClassVar[tuple[str, str]]
    """Tags around the answer, e.g. ``("<answer>", "</answer>")``."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self.max_turns = max_turns
        self.chat_history: ConversationType = []

    @abstractmethod
    def execute(self, action: str) -> tuple[str, dict[str, Any]]:
        """Execute the query in a reply; return the text of the observation and the step's metadata.

        A mistake in the reply is explained in the observation, not raised.
        """

    @abstractmethod
    def score(self, replies: list[str]) -> float:
        """Return the reward of the model's replies, one text per turn, without the observations."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Execute the query, or score the replies."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or all(tag in action for tag in self.answer_tags):
            replies = [message["content"] for message in self.chat_history if message["role"] == "assistant"]
            return BaseTextEnvStepOutput(observations=[], reward=self.score(replies), done=True, metadata={})
        observation, metadata = self.execute(action)
        message = {"role": "user", "content": observation}
        self.chat_history.append(message)
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns."""
        return {"steps": self.turns}
