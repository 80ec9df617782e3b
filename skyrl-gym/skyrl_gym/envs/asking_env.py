"""Episodes in which the model asks something each turn, in a format of tags, until it answers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType


class AskingEnv(BaseTextEnv):
    """A turn asks, unless the reply has the tags of an answer or is the last; then what the model wrote is scored."""

    answer_tags: ClassVar[tuple[str, str]]
    """Around the answer, e.g. ``("<answer>", "</answer>")``."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self.max_turns = max_turns
        self.chat_history: ConversationType = []

    @abstractmethod
    def ask(self, action: str) -> tuple[str, dict[str, Any]]:
        """What the model is told, and the step's metadata. What is wrong with the reply is told, not raised."""

    @abstractmethod
    def score(self, replies: list[str]) -> float:
        """The reward of all that the model wrote, a text for each turn; what it was told is none of it."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Ask, or score."""
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        if self.turns >= self.max_turns or all(tag in action for tag in self.answer_tags):
            replies = [message["content"] for message in self.chat_history if message["role"] == "assistant"]
            return BaseTextEnvStepOutput(observations=[], reward=self.score(replies), done=True, metadata={})
        told, metadata = self.ask(action)
        message = {"role": "user", "content": told}
        self.chat_history.append(message)
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """Turns."""
        return {"steps": self.turns}
