"""Functions that a model may call. A `ToolGroup` is an object whose methods marked with `@tool` are tools."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skyrl_gym.tools.messages import Content
    from skyrl_gym.tools.schema import Signature

PREFIX = re.compile(r"[A-Za-z0-9_-]+")


class tool:
    """A decorator that turns a method of a `ToolGroup` into a tool of the same name.

    >>> class Calculator(ToolGroup):
    ...     @tool
    ...     def add(self, a: int, b: int) -> str:
    ...         "Add two numbers."
    ...         return str(a + b)
    >>> Calculator("calculator").call("add", {"a": 2, "b": "3"})
    '5'
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = func.__name__
        self.__doc__ = func.__doc__

    def __get__(self, instance: object | None, owner: type) -> Any:
        """Return the bound method on an instance, and the descriptor itself on the class."""
        return self if instance is None else MethodType(self.func, instance)


class ToolGroup:
    """Base class for tools that share state, e.g. a connection. A subclass releases its resources in `close`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get_name(self) -> str:
        """Return the group's name."""
        return self._name

    def get_tool_names(self) -> list[str]:
        """Return the names of the tools in alphabetical order."""
        return [name for name, value in inspect.getmembers_static(type(self)) if isinstance(value, tool)]

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the tool `name`, bound to this group, or None if there is none."""
        if name not in self.get_tool_names():
            return None
        function: Callable[..., Any] = getattr(self, name)
        return function

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the tool `name`. Raises ValueError if there is no such tool."""
        function = self.get_tool(name)
        if function is None:
            known = ", ".join(self.get_tool_names()) or "none"
            raise ValueError(f"Tool '{name}' not found in ToolGroup '{self._name}'; its tools: {known}")
        return function(*args, **kwargs)

    def get_schemas(self) -> list[dict[str, Any]]:
        """Return the tool schemas in the format of chat templates and the OpenAI API."""
        return [self._signature(name).schema for name in self.get_tool_names()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        """Call the tool `name` with validated arguments, and return its result for the model, as text.

        Raises:
            ToolCallError: the arguments do not match the tool. The message is for the model.
            ToolFailure: a service that the tool depends on fails.
        """
        return str(self.execute_tool(name, **self._signature(name).check(arguments)))

    def _signature(self, name: str) -> Signature:
        from skyrl_gym.tools.schema import Signature  # imports pydantic: slow

        cache: dict[str, Signature] = vars(self).setdefault("_signatures", {})
        if name not in cache:
            function = self.get_tool(name)
            assert function is not None
            cache[name] = Signature(name, function)
        return cache[name]

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return the group's name for each of its tools."""
        return dict.fromkeys(self.get_tool_names(), self._name)

    def close(self) -> None:
        """Release the group's resources. Idempotent."""


class Prefixed(ToolGroup):
    """A wrapper that prefixes the names of a group's tools: with the prefix ``web``, `search` becomes `web_search`.

    Use it to offer two tools with the same name, e.g. from two search servers.
    """

    def __init__(self, group: ToolGroup, prefix: str) -> None:
        """Wrap a group. Its new name is the prefix. Raises ValueError if the prefix is not a word."""
        super().__init__(prefix)
        if not PREFIX.fullmatch(prefix):
            raise ValueError(f"prefix={prefix!r} of {group.get_name()!r} must consist of letters, digits, _ and -")
        self._group = group
        self._original_names = {f"{prefix}_{name}": name for name in group.get_tool_names()}

    def get_tool_names(self) -> list[str]:
        return list(self._original_names)

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._group.get_tool(self._original_names[name]) if name in self._original_names else None

    def get_schemas(self) -> list[dict[str, Any]]:
        prefixed_names = {original: prefixed for prefixed, original in self._original_names.items()}
        functions = (schema["function"] for schema in self._group.get_schemas())
        renamed = ({**function, "name": prefixed_names[function["name"]]} for function in functions)
        return [{"type": "function", "function": function} for function in renamed]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Content:
        return self._group.call(self._original_names[name], arguments)

    def close(self) -> None:
        self._group.close()
