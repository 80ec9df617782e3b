"""Derive command lines from pydantic models: each field is a flag, with its docstring as help text."""

import argparse
import json
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ValidationError


def _parse_json(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any], BeforeValidator(_parse_json)]
"""A JSON object, or JSON text of one."""


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the list of all flags."""

    def parse_flags(self, arguments: Sequence[str] | None = None) -> dict[str, Any]:
        """Parse a command line. If a flag is unknown, exit with a message that names the nearest one."""
        known = self._option_string_actions
        for argument in sys.argv[1:] if arguments is None else arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and name not in known:
                nearest = get_close_matches(name, known, n=1)
                self.error(f"unknown flag {name}" + (f". Did you mean {nearest[0]}?" if nearest else ""))
        return vars(self.parse_args(arguments))

    def error(self, message: str) -> NoReturn:
        """Exit with a message."""
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the flags)\n")


def flag(name: str) -> str:
    """Return a field's flag, e.g. `--base-model` for `base_model`."""
    return f"--{name.replace('_', '-')}"


def add_flag(parser: argparse.ArgumentParser, model: type[BaseModel], name: str, *more: str) -> None:
    """Add a field's flag and its aliases. A boolean field also gets `--no-…`."""
    field = model.model_fields[name]
    default = "" if field.is_required() else f" (default: {field.get_default(call_default_factory=True)})"
    options: dict[str, Any] = {"required": field.is_required()}
    if field.annotation is bool:
        options = {"action": argparse.BooleanOptionalAction}
    parser.add_argument(
        *(flag(name), *more),
        dest=name,
        default=argparse.SUPPRESS,
        help=f"{field.description}{default}".replace("%", "%%"),
        **options,
    )


def format_errors(error: ValidationError) -> str:
    """Return one line with the invalid flags and the reasons."""
    reasons = []
    for problem in error.errors():
        value = f"{flag(str(problem['loc'][0]))}={problem['input']!r}: " if problem["loc"] else ""
        reasons.append(value + problem["msg"].removeprefix("Value error, "))
    return "; ".join(reasons)


def format_setting_errors(error: ValidationError) -> str:
    """Return one line with the invalid settings of a JSON object and the reasons."""
    return "; ".join(
        f"{'.'.join(map(str, problem['loc']))}={problem['input']!r}: {problem['msg']}" for problem in error.errors()
    )
