"""An OpenEnv server's action schema: `GET /schema`, fetched once per server."""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from skyrl_gym.adapters.openenv.client import ServerUnavailable, SessionOptions, http_url

Schema = Mapping[str, Any]
"""A JSON Schema."""

_schemas: dict[str, Schema] = {}
_locks: dict[str, threading.Lock] = {}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an action, e.g. ``Field("column", "integer", True, "where to drop a disc", ())``.

    type: the JSON type, or several, such as ``integer or null``.
    choices: the allowed values. Empty if all are allowed.
    """

    name: str
    type: str
    is_required: bool
    description: str
    choices: tuple[Any, ...]

    def __str__(self) -> str:
        kind = f"one of {', '.join(json.dumps(choice) for choice in self.choices)}" if self.choices else self.type
        description = f": {self.description}" if self.description else ""
        return f"{self.name} ({kind}{'' if self.is_required else ', optional'}){description}"


async def fetch_action_schema(url: str, options: SessionOptions) -> Schema:
    """Return the JSON Schema of actions on the server at `url`.

    Raises:
        ServerUnavailable: the schema cannot be fetched.
    """
    schema_url = http_url(url, "/schema")
    if schema_url not in _schemas:
        await asyncio.to_thread(_fetch_once, schema_url, options)
    return _schemas[schema_url]


def action_fields(schema: Schema) -> list[Field]:
    """Return the fields that the model fills in: all except `metadata` and constants."""
    required = schema.get("required") or []
    return [
        _field(name, resolved, name in required)
        for name, field_schema in (schema.get("properties") or {}).items()
        if name != "metadata" and "const" not in (resolved := _resolve(schema, field_schema))
    ]


def has_tool_actions(schema: Schema) -> bool:
    """Return True if actions are tool calls, as in environments built on MCP."""
    return any({"tool_name", "arguments"} <= (branch.get("properties") or {}).keys() for branch in _branches(schema))


def _branches(schema: Schema) -> Iterator[Schema]:
    yield schema
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or []:
            yield _resolve(schema, branch)


def _resolve(schema: Schema, part: Any) -> Schema:
    """Resolve a `$ref` into the schema's own definitions. The schema `true` becomes an empty one."""
    if not isinstance(part, Mapping):
        return {}
    reference = part.get("$ref")
    if not isinstance(reference, str):
        return part
    target: Any = schema
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return {**target, **part} if isinstance(target, Mapping) else part


def _field(name: str, schema: Schema, is_required: bool) -> Field:
    branches = (branch for branch in schema.get("anyOf") or [] if isinstance(branch, Mapping))
    types = [schema.get("type"), *(branch.get("type") for branch in branches)]
    joined_types = " or ".join(kind for kind in types if isinstance(kind, str)) or "any value"
    choices = tuple(schema.get("enum") or ())
    return Field(name, joined_types, is_required, str(schema.get("description") or ""), choices)


def _fetch_once(schema_url: str, options: SessionOptions) -> None:
    with _locks.setdefault(schema_url, threading.Lock()):  # episodes that start together send one request
        if schema_url not in _schemas:
            request = urllib.request.Request(schema_url, headers=dict(options.headers))
            try:
                with urllib.request.urlopen(request, timeout=options.connect_timeout_s) as response:
                    schema = json.load(response)["action"]
            except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
                raise ServerUnavailable(
                    f"{schema_url} returned no schema of actions ({error!r}); set environment.skyrl_gym.openenv.action."
                    "text_field to the field that takes the model's reply, or action.format=tools"
                ) from error
            if not isinstance(schema, Mapping):
                raise ServerUnavailable(f"{schema_url} returned action={schema!r}, which must be a JSON Schema")
            _schemas[schema_url] = schema
