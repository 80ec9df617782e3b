"""Functions that a model may call: `@tool` marks a method, and a `ToolGroup` is an object that holds such methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any


class tool:
    """Marks a method of a `ToolGroup` as a tool, under the method's own name.

    class Calculator(ToolGroup):
        @tool
        def add(self, a: int, b: int) -> str:
            "Add two numbers."
            return str(a + b)
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def __get__(self, instance: object | None, owner: type) -> Any:
        """The mark itself on the class, the bound method on an instance."""
        return self if instance is None else MethodType(self.function, instance)


class ToolGroup:
    """Tools that share state, e.g. a connection. What a subclass opens, it releases in `close`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        """The group's name."""
        return self._name

    def get_tool_names(self) -> list[str]:
        """The names of its tools, in alphabetical order."""
        return [name for name, value in inspect.getmembers_static(type(self)) if isinstance(value, tool)]

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """The tool `name`, bound to this group; None if there is none."""
        if name not in self.get_tool_names():
            return None
        function: Callable[..., Any] = getattr(self, name)
        return function

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the tool `name` returns for these arguments; ValueError if there is no such tool."""
        function = self.get_tool(name)
        if function is None:
            known = ", ".join(self.get_tool_names()) or "none"
            raise ValueError(f"Tool '{name}' not found in ToolGroup '{self._name}'; its tools: {known}")
        return function(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """The group's name for each of its tools."""
        return dict.fromkeys(self.get_tool_names(), self._name)

    def close(self) -> None:
        """Release what the group holds. Calling it again does nothing."""
