"""Conversion of a call's text arguments to the types of the tool's JSON Schema.

Formats such as Qwen3-Coder's and GLM's write every value as text: `5`, `True`, `["a", "b"]`, `null`.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.strict_json import BadJSON, parse_json

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}
_PYTHON_NAMES = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false", "None": "null"}


def convert_arguments(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parse text arguments as JSON where the schema does not accept a string.

    Text stays text wherever a string is allowed: `5` for `{"type": ["string", "integer"]}` is the string "5". Text that
    matches none of the schema's types is returned unchanged, and argument validation reports the problem.

    Args:
        parameters: the JSON Schema of the arguments, an object. References into the schema itself are followed.

    >>> schema = {"properties": {"n": {"type": "integer"}, "query": {"type": "string"}}}
    >>> convert_arguments({"n": "5", "query": "5"}, schema)
    {'n': 5, 'query': '5'}
    """
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    return {name: _convert(value, properties.get(name, True), parameters) for name, value in arguments.items()}


def _convert(value: Any, schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or _accepts(schema, value, root):
        return value
    try:
        parsed = clean_strings(parse_json(_PYTHON_NAMES.get(value.strip(), value)))
    except BadJSON:
        return value
    return parsed if _accepts(schema, parsed, root) else value


def _accepts(schema: Any, value: Any, root: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> bool:
    """Return True if a schema allows the value's type, and the value itself if the schema lists its values.

    Other keywords, such as `pattern`, are ignored: they do not show the intended type. So are malformed keywords.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:  # a definition that only refers to itself allows nothing
            return False
        if not _accepts(_resolve(reference, root), value, root, seen | {reference}):
            return False
    lists = {
        key: schema[key] for key in ("type", "enum", "allOf", "anyOf", "oneOf") if isinstance(schema.get(key), list)
    }
    types = [schema["type"]] if isinstance(schema.get("type"), str) else lists.get("type")
    if types is not None and not any(_has_type(value, name) for name in types):
        return False
    choices = [schema["const"]] if "const" in schema else lists.get("enum")
    if choices is not None and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in choices
    ):
        return False
    return all(_accepts(part, value, root, seen) for part in lists.get("allOf", [])) and all(
        any(_accepts(part, value, root, seen) for part in lists[key]) for key in ("anyOf", "oneOf") if lists.get(key)
    )


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the definition at a JSON pointer such as `#/$defs/Point`, or {} (allows anything) if there is none."""
    target: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if not isinstance(target, Mapping) or key not in target:
            return True
        target = target[key]
    return target


def _has_type(value: Any, name: Any) -> bool:
    if name == "integer":
        return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    if isinstance(value, bool):
        return bool(name == "boolean")
    return isinstance(value, _TYPES.get(str(name), ()))
