"""Tools for agents. Importing this package registers the built-in tools."""

from skyrl_agent.tools.base import BaseTool, GroupTool, register_tool, tool_registry
from skyrl_agent.tools.code import CodeInterpreter
from skyrl_agent.tools.finish import EMFinish, Finish
from skyrl_agent.tools.memory import NextWithSummary
from skyrl_agent.tools.web import LocalSearch, SearchEngine, WebBrowser, YouComSearch
from skyrl_agent.tools.workspace import ExecuteBash, StrReplaceEditor, Submit, Think

__all__ = [
    "BaseTool",
    "CodeInterpreter",
    "EMFinish",
    "ExecuteBash",
    "Finish",
    "GroupTool",
    "LocalSearch",
    "NextWithSummary",
    "SearchEngine",
    "StrReplaceEditor",
    "Submit",
    "Think",
    "WebBrowser",
    "YouComSearch",
    "register_tool",
    "tool_registry",
]
