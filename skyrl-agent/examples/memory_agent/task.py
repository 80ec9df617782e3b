"""The task: remember the content of one of several boxes. Each box is described in its own document."""

from collections.abc import Mapping
from typing import Any

from skyrl_agent.tasks.memagent import MemAgentTask, get_context


class BoxesTask(MemAgentTask):
    """A memory task with one document per section. The reward is 1 for the right digit, else 0."""

    max_section_chars = 40

    @classmethod
    def evaluate_result(cls, result: Any, instance: Mapping[str, Any], data_source: str) -> float:
        """Return 1.0 for the right answer, else 0.0."""
        return float(result == instance["answer"])

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row without a text."""
        get_context(instance)
