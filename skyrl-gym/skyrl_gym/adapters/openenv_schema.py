"""What an OpenEnv server says of its actions: `GET /schema`, asked once per server."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from skyrl_gym.adapters.openenv_client import ServerUnavailable, SessionOptions, http_url

Schema = Mapping[str, Any]
"""A JSON Schema."""

_schemas: dict[str, Schema] = {}
_asking: dict[str, threading.Lock] = {}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an action, e.g. ``Field("column", "integer", True, "where to drop a disc", ())``.

    type: of JSON, or several, as ``integer or null``.
    choices: the only values that it may have; none, if it may have any.
    """

    name: str
    type: str
    is_required: bool
    description: str
    choices: tuple[Any, ...]

    def __str__(self) -> str:
        kind = f"one of {', '.join(json.dumps(choice) for choice in self.choices)}" if self.choices else self.type
        told = f": {self.description}" if self.description else ""
        return f"{self.name} ({kind}{'' if self.is_required else ', optional'}){told}"


async def action_schema(url: str, options: SessionOptions) -> Schema:
    """The JSON Schema of the actions that the server at `url` takes.

    Raises:
        ServerUnavailable: it cannot be had.
    """
    where = http_url(url, "/schema")
    if where not in _schemas:
        await asyncio.to_thread(_fetch_once, where, options)
    return _schemas[where]


def action_fields(schema: Schema) -> list[Field]:
    """The fields that a model fills in: neither `metadata`, nor what can have one value only."""
    required = schema.get("required") or []
    return [
        _field(name, resolved, name in required)
        for name, described in (schema.get("properties") or {}).items()
        if name != "metadata" and "const" not in (resolved := _resolved(schema, described))
    ]


def is_of_tools(schema: Schema) -> bool:
    """Whether actions are calls of tools, as in the environments that are built on MCP."""
    return any({"tool_name", "arguments"} <= (branch.get("properties") or {}).keys() for branch in _branches(schema))


def _branches(schema: Schema) -> Iterator[Schema]:
    yield schema
    for key in ("anyOf", "oneOf"):
        for branch in schema.get(key) or []:
            yield _resolved(schema, branch)


def _resolved(schema: Schema, described: Any) -> Schema:
    """What a `$ref` into the schema's own definitions stands for; `true` is a schema too, which says nothing."""
    if not isinstance(described, Mapping):
        return {}
    reference = described.get("$ref")
    if not isinstance(reference, str):
        return described
    target: Any = schema
    for step in reference.removeprefix("#/").split("/"):
        target = target.get(step) if isinstance(target, Mapping) else None
    return {**target, **described} if isinstance(target, Mapping) else described


def _field(name: str, described: Schema, is_required: bool) -> Field:
    branches = (branch for branch in described.get("anyOf") or [] if isinstance(branch, Mapping))
    types = [described.get("type"), *(branch.get("type") for branch in branches)]
    known = " or ".join(kind for kind in types if isinstance(kind, str)) or "any value"
    choices = tuple(described.get("enum") or ())
    return Field(name, known, is_required, str(described.get("description") or ""), choices)


def _fetch_once(where: str, options: SessionOptions) -> None:
    with _asking.setdefault(where, threading.Lock()):  # of a hundred episodes that begin together, one asks
        if where not in _schemas:
            _schemas[where] = _fetch(where, options)


def _fetch(where: str, options: SessionOptions) -> Schema:
    request = urllib.request.Request(where, headers=dict(options.headers))
    try:
        with urllib.request.urlopen(request, timeout=options.connect_timeout_s) as response:
            schema = json.load(response)["action"]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise ServerUnavailable(
            f"{where} does not say what actions look like ({error!r}); set environment.skyrl_gym.openenv.action."
            "text_field to the field that takes the model's reply, or action.format=tools"
        ) from error
    if not isinstance(schema, Mapping):
        raise ServerUnavailable(f"{where} has action={schema!r}, which must be a JSON Schema")
    return schema
