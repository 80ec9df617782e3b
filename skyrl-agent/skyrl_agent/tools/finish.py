"""Tools that end a trajectory with its result."""

from __future__ import annotations

from typing import Any

from skyrl_agent.tools.base import BaseTool, ToolUser, register_tool, text_parameters


@register_tool("finish")
class Finish(BaseTool):
    """Finish with an answer of any length."""

    description = "Finish the task with your final answer. Call it once you are sure; nothing can follow."
    parameters = text_parameters(answer="The complete answer to the task.")
    ends_trajectory = True

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        return str(params["answer"]).strip()


@register_tool("em_finish")
class EMFinish(Finish):
    """Finish with a short answer. It is compared word for word."""

    description = (
        "Finish with the final answer: a name, a date, a number or a few words, without an explanation, because it is "
        "compared word for word."
    )
