"""How a model's reply becomes the actions of an OpenEnv environment: its text, a value, JSON, or calls of tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_gym.adapters.actions import CLOSING, OPENING, ActionError, calls_in, json_object, said, whole_number
from skyrl_gym.adapters.openenv_schema import Field, Schema, action_fields
from skyrl_gym.tools.calls import ToolCall
from skyrl_gym.tools.messages import tools_prompt
from skyrl_gym.tools.strict_json import BadJSON, read_json

WORDS = {"true": True, "false": False}


class ActionFormat(Protocol):
    """A way to read replies."""

    @property
    def instructions(self) -> str:
        """What a model has to be told of it; nothing, where a reply is an action as it stands."""
        ...

    def read(self, reply: str) -> list[dict[str, Any]]:
        """The actions in a reply, in order, each as its fields. Raises ActionError."""
        ...


@dataclass(frozen=True, slots=True)
class TextAction:
    """The reply itself is the value of one field."""

    field: str

    @property
    def instructions(self) -> str:
        """See `ActionFormat`."""
        return ""

    def read(self, reply: str) -> list[dict[str, Any]]:
        """See `ActionFormat`."""
        return [{self.field: said(reply)}]


@dataclass(frozen=True, slots=True)
class ValueAction:
    """The reply names the value of one field, which is no free text: a number, a truth value, one of several words.

    JSON is understood, too.
    """

    field: Field

    @property
    def instructions(self) -> str:
        """See `ActionFormat`."""
        return f"Write your action between {OPENING} and {CLOSING}, the value of {self.field}."

    def read(self, reply: str) -> list[dict[str, Any]]:
        """See `ActionFormat`."""
        text = said(reply)
        if "{" in text:
            return [json_object(text)]
        for choice in self.field.choices:
            if text.casefold() == str(choice).casefold():
                return [{self.field.name: choice}]
        if self.field.choices:
            raise ActionError(f"Your action is not one of {', '.join(map(str, self.field.choices))}.")
        if "boolean" in self.field.type and text.casefold() in WORDS:
            return [{self.field.name: WORDS[text.casefold()]}]
        if "number" in self.field.type:
            return [{self.field.name: _number(text)}]
        return [{self.field.name: whole_number(text)}]


@dataclass(frozen=True, slots=True)
class JsonAction:
    """The reply holds a JSON object, bare, fenced or in `<action>`; the server checks its fields."""

    fields: Sequence[Field]

    @property
    def instructions(self) -> str:
        """See `ActionFormat`."""
        lines = [f"Write your action between {OPENING} and {CLOSING}, as one JSON object with these fields:"]
        return "\n".join(lines + [f"- {field}" for field in self.fields])

    def read(self, reply: str) -> list[dict[str, Any]]:
        """See `ActionFormat`."""
        return [json_object(said(reply))]


@dataclass(frozen=True, slots=True)
class ToolAction:
    """The reply calls tools, see `skyrl_gym.tools.calls`. `tools` is what the server answers to `list_tools`."""

    tools: Sequence[Mapping[str, Any]]

    @property
    def instructions(self) -> str:
        """See `ActionFormat`."""
        return tools_prompt([_function(tool) for tool in self.tools])

    def read(self, reply: str) -> list[dict[str, Any]]:
        """See `ActionFormat`. There may be no call in a reply."""
        schemas = {tool["name"]: _parameters(tool) for tool in self.tools}
        return [
            {"type": "call_tool", "tool_name": call.name, "arguments": _typed(call, schemas.get(call.name, {}))}
            for call in calls_in(reply)
        ]


def format_of(schema: Schema) -> ActionFormat:
    """The simplest way to write the actions of a schema that are no calls of tools."""
    fields = action_fields(schema)
    asked_for = [field for field in fields if field.is_required] or fields
    if len(asked_for) != 1:
        return JsonAction(fields)
    (field,) = asked_for
    if field.type == "string" and not field.choices:
        return TextAction(field.name)
    is_simple = field.choices or set(field.type.split(" or ")) <= {"integer", "number", "boolean", "null"}
    return ValueAction(field) if is_simple else JsonAction(fields)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return whole_number(text)
    if value in (float("inf"), float("-inf")) or value != value:
        raise ActionError("Your action must be a finite number.")
    return value


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": _parameters(tool)}
    return {"type": "function", "function": described}


def _parameters(tool: Mapping[str, Any]) -> Schema:
    return tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}


def _typed(call: ToolCall, parameters: Schema) -> dict[str, Any]:
    """The arguments, where text stands for a number, a list, … because the call could not say it otherwise."""
    texts = {field.name for field in action_fields(parameters) if "string" in field.type or field.type == "any value"}
    return {name: value if name in texts else _from_text(value) for name, value in call.arguments.items()}


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except BadJSON:
        return value  # the server says what is wrong with it
