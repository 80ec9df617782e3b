"""Agents for long tasks: tools, tasks, parallel trajectories, and training on several backends.

runner = AutoAgentRunner.from_task("task.yaml", engine, tokenizer)
output = await runner.run(rows)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_agent.agents.base import BaseAgent, Outcome
    from skyrl_agent.agents.react import ReActAgent
    from skyrl_agent.auto import AutoAgentRunner
    from skyrl_agent.config import AgentConfig
    from skyrl_agent.runner import AgentRunner
    from skyrl_agent.tasks.base import BaseTask
    from skyrl_agent.tools.base import BaseTool, register_tool

_MODULES = {
    "AgentConfig": "config",
    "AgentRunner": "runner",
    "AutoAgentRunner": "auto",
    "BaseAgent": "agents.base",
    "BaseTask": "tasks.base",
    "BaseTool": "tools.base",
    "Outcome": "agents.base",
    "ReActAgent": "agents.react",
    "register_tool": "tools.base",
}

__all__ = [
    "AgentConfig",
    "AgentRunner",
    "AutoAgentRunner",
    "BaseAgent",
    "BaseTask",
    "BaseTool",
    "Outcome",
    "ReActAgent",
    "register_tool",
]


def __getattr__(name: str) -> object:
    """Import a name on first use, since the trainer's modules are slow to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
