"""Calls of Llama: JSON after a tag (3.1), bare JSON, or a list in Python's notation (3.2 and 4).

    <|python_tag|>{"name": "search", "parameters": {"query": "Mount Fuji"}}
    [search(query="Mount Fuji"), search(query="Etna")]

Nothing marks bare JSON and lists as calls, so they are parsed only if the caller asks for the format.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from skyrl_gym.runtime.text import clean_strings
from skyrl_gym.tools.calls.call import Format, MalformedCall, Parsed, ToolCall, parse_json_in, skip_space, to_call
from skyrl_gym.tools.strict_json import BadJSON, check_depth

_CONSTANTS = {"true": True, "false": False, "null": None}
_PYTHONIC = re.compile(r"(?:<\|python_start\|>)?\s*(\[\s*[A-Za-z_][\w.]*\s*\(.*?)\s*(?:<\|[a-z_]+\|>\s*)*", re.DOTALL)
_END_TOKEN = re.compile(r"<\|[a-z_]+\|>")


def _parse(text: str, start: int, end: int) -> Parsed:
    calls = []
    while True:
        value, position = parse_json_in(text, end)
        calls.append(to_call(value, position))
        end = skip_space(text, position)
        if not text.startswith(";", end):
            return Parsed(calls, end)
        end += 1


def parse_bare_json(text: str) -> list[ToolCall]:
    """Parse a reply that is one or several JSON objects, separated by semicolons, or a list of them; else no call."""
    start = skip_space(text, 0)
    if text.startswith("[", start):
        values, end = parse_json_in(text, start)
        calls = [to_call(value, end) for value in values]
    elif text.startswith("{", start):
        calls, end = _parse(text, 0, start)[:2]
    else:
        return []
    if _END_TOKEN.sub("", text[end:]).strip():
        raise MalformedCall("Your reply has text after the tool call.", end)
    return calls


def parse_pythonic(text: str) -> list[ToolCall]:
    """Parse a reply that is a list of calls in Python's notation with keyword arguments; else no call."""
    found = _PYTHONIC.fullmatch(text.strip())
    if found is None:
        return []
    try:
        tree = ast.parse(found[1], mode="eval").body
        return [_pythonic_call(node) for node in getattr(tree, "elts", [tree])]
    except (SyntaxError, ValueError, TypeError, BadJSON, RecursionError, MemoryError) as error:
        raise MalformedCall(
            f'The tool calls are not a list such as [name(key="value")], with literals as values ({error}).', len(text)
        ) from error


def _pythonic_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("each item must be a call with keyword arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is not supported")
        arguments[keyword.arg] = _literal(keyword.value)
    return ToolCall(ast.unparse(node.func), clean_strings(arguments))


class _JsonNames(ast.NodeTransformer):
    """Replaces `true`, `false` and `null` by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON can express."""
    value = ast.literal_eval(_JsonNames().visit(node))
    check_depth(value)
    return json.loads(json.dumps(value, allow_nan=False))


LLAMA = Format(r"<\|python_tag\|>", _parse)
