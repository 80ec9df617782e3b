"""What a model is told of a tool, and the check of what it answers: JSON Schema from a function's signature."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from skyrl_gym.tools.calls import ToolCallError

ARGS = re.compile(r"^\s*Args:\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Signature:
    """The arguments of one tool.

    Types come from the annotations, what they are for from an `Args:` section of the docstring:

        def search(self, query: str, n_results: int = 3) -> str:
            '''Search the encyclopedia.

            Args:
                query: what to look for
            '''
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        doc = inspect.getdoc(function) or ""
        self.description = ARGS.split(doc, maxsplit=1)[0].strip()
        self._function = function
        self._told = _told_of_arguments(doc)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's interface describe it."""
        parameters = self._model.model_json_schema()
        parameters.pop("title", None)
        for described in parameters.get("properties", {}).values():
            described.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function takes them: the text "3" is a number where a number is asked for.

        Raises:
            ToolCallError: one is missing, unknown or of another type.
        """
        try:
            checked = self._model.model_validate({name: self._read(name, value) for name, value in arguments.items()})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolCallError(f"The arguments of {self.name} are wrong: {problems}.") from error
        return {name: getattr(checked, name) for name in checked.model_fields_set}

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self._function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self._function).parameters.items():
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (hints.get(name, Any), Field(default, description=self._told.get(name)))
        return create_model(self.name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)

    def _read(self, name: str, value: Any) -> Any:
        """Text that stands for a list or an object, which the plain syntax cannot say otherwise."""
        field = self._model.model_fields.get(name)
        if not isinstance(value, str) or field is None or field.annotation in (str, Any):
            return value
        if value.lstrip()[:1] not in ("[", "{"):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value  # the check says what is wrong with it


def _told_of_arguments(doc: str) -> dict[str, str]:
    """What an `Args:` section says of each argument."""
    _, *sections = ARGS.split(doc, maxsplit=1)
    told: dict[str, str] = {}
    name = ""
    for line in "".join(sections).splitlines():
        if match := ARGUMENT.match(line):
            name = match[1]
            told[name] = match[2]
        elif name and line.strip():
            told[name] += f" {line.strip()}"
    return told
