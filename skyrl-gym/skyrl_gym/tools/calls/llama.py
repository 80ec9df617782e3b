"""Calls of Llama 3 and 4: JSON after a tag, separated by semicolons or white space, or a list in Python's notation.

    <|python_tag|>{"name": "search", "parameters": {"query": "Mount Fuji"}}
    <|python_start|>[search(query="Mount Fuji"), search(query="Etna")]<|python_end|>

Llama 3.2 and 4 may leave the tags out. Nothing marks these as calls then, so they are text unless `is_bare`.
"""

import ast
import json
import re
from typing import Any

from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.calls.call import (
    Format,
    MalformedCall,
    Parsed,
    ToolCall,
    named_call,
    parse_json_in,
    skip_space,
    to_call,
)

_NAME = re.compile(r"[A-Za-z_][\w.]*")
LIST = rf"\[\s*{_NAME.pattern}\("
"""Beginning of a list in Python's notation."""
_STRINGS_AND_BRACKETS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[({]|[\])}]""", re.DOTALL)
_MAX_DEPTH = 50
_CONSTANTS = {"true": True, "false": False, "null": None}


def _parse(text: str, start: int, end: int) -> Parsed:
    end = skip_space(text, end)
    if text.startswith("[", end):
        return _parse_list(text, end)
    calls = []
    while True:
        value, position = parse_json_in(text, end)
        calls.append(to_call(value, position))
        end = skip_space(text, position)
        if text.startswith(";", end):
            end += 1
        elif not text.startswith("{", end):
            return Parsed(calls, end)


def _parse_list(text: str, start: int) -> Parsed:
    """Parse a list of calls with literal keyword arguments. Nothing is executed."""
    depth = 0
    for token in _STRINGS_AND_BRACKETS.finditer(text, start):
        depth += (token[0] in "[({") - (token[0] in "])}")
        if depth in (0, _MAX_DEPTH):
            break
    if depth:
        raise MalformedCall("The list of tool calls is not closed, or nested too deeply.", len(text))
    end = token.end()
    try:
        tree = ast.parse(text[start:end], mode="eval").body
        return Parsed([_read_call(node, end) for node in tree.elts], end)  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        form = '[search(query="Mount Fuji")]'
        raise MalformedCall(
            f"The list of tool calls must be Python with literal keyword arguments: {form}.", end
        ) from error


def _read_call(node: Any, end: int) -> ToolCall:
    name = ast.unparse(node.func)
    arguments = {keyword.arg: ast.literal_eval(_NameReader().visit(keyword.value)) for keyword in node.keywords}
    if node.args or None in arguments or len(arguments) < len(node.keywords) or not _NAME.fullmatch(name):
        raise ValueError("a call of something else, or arguments that are positional, unpacked or repeated")
    return named_call(name, clean_strings(json.loads(json.dumps(arguments, allow_nan=False))), end)


class _NameReader(ast.NodeTransformer):
    """Replaces JSON's constants, as models also write them."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


LLAMA = Format(rf"<\|python_tag\|>|<\|python_start\|>(?=\s*{LIST})", _parse)
