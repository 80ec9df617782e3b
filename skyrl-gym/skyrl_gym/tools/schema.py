"""A tool's JSON Schema from its function signature, and validation of call arguments."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCallError

ARGS = re.compile(r"^\s*Args:\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Signature:
    """The signature of a tool.

    Types come from the annotations, descriptions from the `Args:` section of the docstring:

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
        _, *sections = ARGS.split(doc, maxsplit=1)
        descriptions: dict[str, str] = {}
        name = ""
        for line in "".join(sections).splitlines():
            if match := ARGUMENT.match(line):
                name = match[1]
                descriptions[name] = match[2]
            elif name and line.strip():
                descriptions[name] += f" {line.strip()}"
        self._descriptions = descriptions

    @cached_property
    def schema(self) -> dict[str, Any]:
        """The tool's schema in the format of chat templates and the OpenAI API."""
        parameters = self._model.model_json_schema()
        parameters.pop("title", None)
        for parameter in parameters.get("properties", {}).values():
            parameter.pop("title", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments, and convert them to the function's types, e.g. "3" to a number.

        Raises:
            ToolCallError: an argument is missing, unknown or of the wrong type.
        """
        try:
            model = self._model.model_validate(convert_arguments(arguments, self.schema["function"]["parameters"]))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolCallError(f"The arguments of {self.name} are wrong: {problems}.") from error
        fields = self._model.model_fields
        return {str(fields[key].alias): getattr(model, key) for key in fields if key in model.model_fields_set}

    @cached_property
    def _model(self) -> type[BaseModel]:
        hints = get_type_hints(self._function)
        fields: dict[str, Any] = {}
        for name, parameter in inspect.signature(self._function).parameters.items():
            default = ... if parameter.default is parameter.empty else parameter.default
            field = Field(default, alias=name, description=self._descriptions.get(name))
            fields[f"field_{len(fields)}"] = (hints.get(name, Any), field)  # a field cannot be named `schema` or `_x`
        return create_model(self.name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)
