"""Functions that a model may call: `@tool` marks a method, and a `ToolGroup` is an object that holds such methods."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_gym.tools.schema import Signature

PREFIX = re.compile(r"[A-Za-z0-9_-]+")


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

    def get_schemas(self) -> list[dict[str, Any]]:
        """Its tools as chat templates and OpenAI's interface describe them."""
        return [self._signature(name).schema for name in self.get_tool_names()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What a model reads after it has called the tool `name`.

        Raises:
            ToolCallError: the arguments are not those of the tool; the message is for the model.
            ToolFailure: what the tool depends on fails.
        """
        return str(self.execute_tool(name, **self._signature(name).check(arguments)))

    def _signature(self, name: str) -> Signature:
        from skyrl_gym.tools.schema import Signature  # pydantic takes its time to load

        known: dict[str, Signature] = vars(self).setdefault("_signatures", {})
        if name not in known:
            function = self.get_tool(name)
            assert function is not None
            known[name] = Signature(name, function)
        return known[name]

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """The group's name for each of its tools."""
        return dict.fromkeys(self.get_tool_names(), self._name)

    def close(self) -> None:
        """Release what the group holds. Calling it again does nothing."""


class Prefixed(ToolGroup):
    """The tools of another group under names of their own: with the prefix ``web``, `search` is called `web_search`.

    It is the way to offer two tools of one name, e.g. those of two search servers.
    """

    def __init__(self, group: ToolGroup, prefix: str) -> None:
        """The group is called like its prefix. Raises ValueError where that is no word."""
        super().__init__(prefix)
        if not PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix={prefix!r} of {group.get_name()!r} must be of letters, digits, _ and -")
        self._group = group
        self._own_names = {f"{prefix}_{name}": name for name in group.get_tool_names()}

    def get_tool_names(self) -> list[str]:
        """See `ToolGroup`."""
        return list(self._own_names)

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """See `ToolGroup`."""
        return self._group.get_tool(self._own_names[name]) if name in self._own_names else None

    def get_schemas(self) -> list[dict[str, Any]]:
        """See `ToolGroup`."""
        told_names = {own: told for told, own in self._own_names.items()}
        functions = (schema["function"] for schema in self._group.get_schemas())
        renamed = ({**function, "name": told_names[function["name"]]} for function in functions)
        return [{"type": "function", "function": function} for function in renamed]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """See `ToolGroup`."""
        return self._group.call(self._own_names[name], arguments)

    def close(self) -> None:
        """See `ToolGroup`."""
        self._group.close()
