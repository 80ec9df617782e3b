"""The memory agent's tool: it replaces the history with a summary and the next section of a document.

Source: MemAgent (Yu et al., 2025, arXiv:2507.02259).
"""

from __future__ import annotations

from typing import Any

from skyrl_agent.tools.base import BaseTool, ToolUser, register_tool, text_parameters
from skyrl_gym.tools.calls import ToolCallError


@register_tool("next_with_summary")
class NextWithSummary(BaseTool):
    """Read the next section. The trajectory's runtime is the document's `skyrl_agent.tasks.memagent.Reader`."""

    description = (
        "Continue with the next section. Everything that you have read is forgotten, except this summary. Write down "
        "all facts that may help to answer the question, also those of your earlier memory."
    )
    parameters = text_parameters(summary="What you want to remember.")

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> None:
        reader: Any = agent.context.runtime
        if reader.is_at_end:
            raise ToolCallError("This is the last section; finish with your answer.")
        agent.set_history(reader.next_messages(params["summary"]))
