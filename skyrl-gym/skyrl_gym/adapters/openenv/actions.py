"""Parsing of replies as OpenEnv actions: text, a value, JSON, or tool calls."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_gym.adapters.actions import (
    CLOSING,
    OPENING,
    ActionError,
    extract_action,
    parse_calls,
    parse_json_object,
    parse_whole_number,
)
from skyrl_gym.adapters.openenv.schema import Field, Schema, action_fields
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.messages import format_tools_prompt

BOOLEANS = {"true": True, "false": False}


class ActionFormat(Protocol):
    """Base class for the formats of actions in replies."""

    @property
    def instructions(self) -> str:
        """Instructions for the model. Empty if the reply itself is the action."""

    def read(self, reply: str) -> list[dict[str, Any]]:
        """Return the fields of the actions in a reply, in order. Raises ActionError for an invalid reply."""


@dataclass(frozen=True, slots=True)
class TextAction:
    """The reply is the value of one text field."""

    field: str

    @property
    def instructions(self) -> str:
        return ""

    def read(self, reply: str) -> list[dict[str, Any]]:
        return [{self.field: extract_action(reply)}]


@dataclass(frozen=True, slots=True)
class ValueAction:
    """The reply is the value of one field that is not free text: a number, a boolean or a choice.

    A JSON object is also accepted.
    """

    field: Field

    @property
    def instructions(self) -> str:
        return f"Write your action between {OPENING} and {CLOSING}, the value of {self.field}."

    def read(self, reply: str) -> list[dict[str, Any]]:
        text = extract_action(reply)
        if "{" in text:
            return [parse_json_object(text)]
        for choice in self.field.choices:
            if text.casefold() == str(choice).casefold():
                return [{self.field.name: choice}]
        if self.field.choices:
            raise ActionError(f"Your action is not one of {', '.join(map(str, self.field.choices))}.")
        if "boolean" in self.field.type and text.casefold() in BOOLEANS:
            return [{self.field.name: BOOLEANS[text.casefold()]}]
        if "number" in self.field.type:
            return [{self.field.name: _number(text)}]
        return [{self.field.name: parse_whole_number(text)}]


@dataclass(frozen=True, slots=True)
class JsonAction:
    """The reply contains a JSON object: bare, fenced or in `<action>`. The server validates it."""

    fields: Sequence[Field]

    @property
    def instructions(self) -> str:
        lines = [f"Write your action between {OPENING} and {CLOSING}, as one JSON object with these fields:"]
        return "\n".join(lines + [f"- {field}" for field in self.fields])

    def read(self, reply: str) -> list[dict[str, Any]]:
        return [parse_json_object(extract_action(reply))]


@dataclass(frozen=True, slots=True)
class ToolAction:
    """The reply calls tools, as in `skyrl_gym.tools.calls`. `tools` is the result of `list_tools`."""

    tools: Sequence[Mapping[str, Any]]

    @property
    def instructions(self) -> str:
        return format_tools_prompt([_function(tool) for tool in self.tools])

    def read(self, reply: str) -> list[dict[str, Any]]:
        """Return the calls in a reply. There may be none. Raises ActionError for an invalid reply."""
        schemas = {tool["name"]: _parameters(tool) for tool in self.tools}
        return [
            {
                "type": "call_tool",
                "tool_name": call.name,
                "arguments": convert_arguments(call.arguments, schemas.get(call.name, {})),
            }
            for call in parse_calls(reply)
        ]


def choose_format(schema: Schema) -> ActionFormat:
    """Return the simplest format for a schema's actions, if they are not tool calls."""
    fields = action_fields(schema)
    needed = [field for field in fields if field.is_required] or fields
    if len(needed) != 1:
        return JsonAction(fields)
    (field,) = needed
    if field.type == "string" and not field.choices:
        return TextAction(field.name)
    is_simple = field.choices or set(field.type.split(" or ")) <= {"integer", "number", "boolean", "null"}
    return ValueAction(field) if is_simple else JsonAction(fields)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return parse_whole_number(text)
    if value in (float("inf"), float("-inf")) or value != value:
        raise ActionError("Your action must be a finite number.")
    return value


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": _parameters(tool)}
    return {"type": "function", "function": function}


def _parameters(tool: Mapping[str, Any]) -> Schema:
    return tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
