"""Command lines of pydantic models: a field is a flag, `--base-model` for `base_model`, and its docstring the help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ValidationError


def _parsed_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parsed_json)]
"""A JSON object, which may come as text."""


def flag(name: str) -> str:
    """Of a field."""
    return f"--{name.replace('_', '-')}"


def add_flag(parser: argparse.ArgumentParser, model: type[BaseModel], name: str, *more: str) -> None:
    """The flag of a field, and `more` names of it; `--no-…`, too, for what is yes or no."""
    field = model.model_fields[name]
    default = "" if field.is_required() else f" (default: {field.get_default(call_default_factory=True)})"
    told: dict[str, Any] = {"required": field.is_required()}
    if field.annotation is bool:
        told = {"action": argparse.BooleanOptionalAction}
    parser.add_argument(
        *(flag(name), *more),
        dest=name,
        default=argparse.SUPPRESS,
        help=f"{field.description}{default}".replace("%", "%%"),
        **told,
    )


def problems_of(error: ValidationError) -> str:
    """Which flags are wrong, and why, in a line."""
    return "; ".join(_problem(one["loc"], one["input"], one["msg"]) for one in error.errors())


def _problem(place: Sequence[object], given: object, message: str) -> str:
    told = message.removeprefix("Value error, ")
    return f"{flag(str(place[0]))}={given!r}: {told}" if place else told
