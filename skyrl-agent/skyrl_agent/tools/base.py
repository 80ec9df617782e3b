"""Base class for tools, their registry, and their descriptions in prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import jsonschema

from skyrl_agent.chat import Chat
from skyrl_agent.config import AgentGeneration
from skyrl_agent.loading import load_class
from skyrl_gym.envs.entry_point import suggest_name
from skyrl_gym.runtime.env_pool import ThreadPool
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCallError
from skyrl_gym.tools.core import ToolGroup
from skyrl_train.errors import ConfigError

C = TypeVar("C", bound="type[BaseTool]")

INSTRUCTIONS = """You can call these functions:

{functions}

To call one, end your reply with its name and arguments in this format, one call in each reply:

<function=name>
<parameter=first_parameter>value</parameter>
<parameter=second_parameter>
a value
of several lines
</parameter>
</function>"""


@dataclass(slots=True)
class AgentContext:
    """A trajectory's chat, tools, settings and instance."""

    chat: Chat  # begins with the task's instruction
    tools: Mapping[str, BaseTool]
    settings: AgentGeneration
    instance: Any
    trajectory_id: str
    runtime: Any  # created by the task, e.g. a container
    tool_threads: ThreadPool
    tool_calls: dict[str, int] = field(default_factory=dict)  # number of calls per tool


class ToolUser(Protocol):
    """The agent that calls a tool, as tools see it: a `BaseAgent`."""

    context: AgentContext
    chat: Chat
    instance: Any

    def set_history(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the conversation so far."""


class BaseTool(ABC):
    """A function that a model may call. Subclasses set `name`, `description` and `parameters`, and implement `call`.

    Each trajectory has its own instance, so it may keep state.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] | list[dict[str, Any]]
    """JSON schema of an object, or a list of parameters with the keys name, type, description, required, …"""

    ends_trajectory: ClassVar[bool] = False
    """True for a tool whose result ends the trajectory and is its result."""

    def __init__(self, settings: Mapping[str, Any] | None = None) -> None:
        """Store the tool's settings from the task file."""
        self.settings = dict(settings or {})

    @abstractmethod
    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> Any:
        """Return the result for the model: text, or any JSON-serializable value. May block, or be a coroutine function.

        `None` means that the tool has written to `agent.chat` itself. Errors are explained to the model, except
        `skyrl_gym.error.ToolFailure`, which makes the trajectory invalid because a service failed and not the model.
        """

    def close(self) -> None:  # noqa: B027, optional
        """Release resources. Called at the end of the trajectory. Idempotent."""

    def get_system_prompt_prefix(self) -> str | None:
        """Return text to put before the descriptions of tools in the system message, or None."""
        return None

    def get_tool_param(self) -> dict[str, Any]:
        """Return the tool's schema in the format of chat templates and the OpenAI API."""
        function = {"name": self.name, "description": self.description, "parameters": self._schema()}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments, and convert text to numbers, booleans, lists and objects where the schema requires it.

        Raises:
            ToolCallError: an argument is missing, unknown, of the wrong type or not an allowed value.
        """
        schema = self._schema()
        converted = convert_arguments(arguments, schema)
        validator = jsonschema.Draft202012Validator({"additionalProperties": False, **schema})
        if problems := "; ".join(error.message for error in validator.iter_errors(converted)):
            raise ToolCallError(f"the arguments of {self.name} are wrong: {problems}")
        return converted

    def _schema(self) -> dict[str, Any]:
        if isinstance(self.parameters, Mapping):
            return dict(self.parameters)
        properties = {
            parameter["name"]: {key: value for key, value in parameter.items() if key not in ("name", "required")}
            for parameter in self.parameters
        }
        required = [parameter["name"] for parameter in self.parameters if parameter.get("required")]
        return {"type": "object", "properties": properties, "required": required}


def text_parameters(**descriptions: str) -> dict[str, Any]:
    """Return a schema of required text parameters from their descriptions."""
    properties = {name: {"type": "string", "description": text} for name, text in descriptions.items()}
    return {"type": "object", "properties": properties, "required": list(descriptions)}


class GroupTool(BaseTool):
    """A tool of a `skyrl_gym.tools.ToolGroup`, such as search, SQL, Python and MCP servers."""

    def __init__(self, group: ToolGroup, schema: Mapping[str, Any]) -> None:
        """Wrap the group's tool with this schema, one of `group.get_schemas()`."""
        super().__init__()
        self._group = group
        function = schema["function"]
        self.name, self.description, self.parameters = function["name"], function["description"], function["parameters"]

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged. The group validates them when it is called."""
        return dict(arguments)

    def call(self, params: dict[str, Any], *, agent: ToolUser, trajectory_id: str) -> str:
        return str(self._group.call(self.name, params))

    def close(self) -> None:
        self._group.close()


tool_registry: dict[str, type[BaseTool]] = {}
"""Tools that task files can name."""


def register_tool(name: str) -> Callable[[C], C]:
    """Register a tool under the name that task files and the model use.

    Raises:
        ValueError: the name is already taken.
    """

    def decorator(cls: C) -> C:
        if name in tool_registry and tool_registry[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"tool {name!r} is already registered, as {tool_registry[name].__qualname__}")
        cls.name = name
        tool_registry[name] = cls
        return cls

    return decorator


def create_tools(specs: Iterable[str | Mapping[str, Any]]) -> dict[str, BaseTool]:
    """Create a trajectory's tools, by name.

    Args:
        specs: names of registered tools, dotted paths to subclasses of `BaseTool` or `ToolGroup`, or mappings with such
            a `name` and settings: a tool's argument, or a group's keyword arguments.

    Raises:
        ConfigError: a tool does not exist, does not accept its settings, or its name is already taken.
    """
    tools: dict[str, BaseTool] = {}
    with ExitStack() as stack:  # an error closes the tools created before it
        for spec in specs:
            settings = {} if isinstance(spec, str) else dict(spec)
            name = spec if isinstance(spec, str) else settings.pop("name", None)
            created = _create(name, settings)
            stack.callback(close_tools, created)
            for tool in created:
                if tool.name in tools:
                    raise ConfigError(f"tools: two tools have the name {tool.name!r}; remove one of them")
                tools[tool.name] = tool
        stack.pop_all()
    return tools


def close_tools(tools: Iterable[BaseTool]) -> None:
    """Close all tools even if one fails, then raise its error."""
    with ExitStack() as stack:
        for tool in tools:
            stack.callback(tool.close)


def _create(name: Any, settings: dict[str, Any]) -> list[BaseTool]:
    cls: Any = tool_registry.get(name)
    if cls is None:
        if not isinstance(name, str) or "." not in name:
            raise ConfigError(
                f"tools: there is no tool {name!r}{suggest_name(str(name), list(tool_registry))}; registered are "
                f"{', '.join(sorted(tool_registry))}, and dotted paths select others"
            )
        try:
            cls = load_class(name, object)
        except ValueError as error:
            raise ConfigError(f"tools: {error}") from error
    try:
        if issubclass(cls, ToolGroup):
            group = cls(**settings)
            return [GroupTool(group, schema) for schema in group.get_schemas()]
        if issubclass(cls, BaseTool):
            if settings and cls.__init__ is BaseTool.__init__ and cls.__module__.startswith("skyrl_agent."):
                raise ValueError(f"it has no setting {next(iter(settings))!r}")
            if not isinstance(getattr(cls, "name", None), str):
                raise ValueError("it has no name; set the class attribute `name`, or register it")
            return [cls(settings)]
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"tools: {name} with the settings {settings}: {error}") from error
    raise ConfigError(f"tools: {name} is {cls!r}; it must be a subclass of BaseTool or ToolGroup")


def format_tools(tools: Iterable[BaseTool]) -> str:
    """Format the system message section that describes tools and how to call them. Empty without tools."""
    prefixes, functions = [], []
    for tool in tools:
        if prefix := tool.get_system_prompt_prefix():
            prefixes.append(prefix)
        function = tool.get_tool_param()["function"]
        properties, required = function["parameters"].get("properties", {}), function["parameters"].get("required", [])
        lines = [f"{function['name']}: {function['description']}"]
        for name, schema in properties.items():
            kind = f"{schema.get('type', 'string')}{'' if name in required else ', optional'}"
            allowed = f" One of {', '.join(map(str, schema['enum']))}." if "enum" in schema else ""
            lines.append(f"  {name} ({kind}): {schema.get('description', '')}{allowed}".rstrip())
        functions.append("\n".join(lines))
    return "\n\n".join([*prefixes, INSTRUCTIONS.format(functions="\n\n".join(functions))]) if functions else ""
