"""Strict parsing of a model's JSON: finite numbers, unique keys, and a depth that other libraries can process."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Maximum nesting of lists and objects. Recursive JSON readers and writers fail at some hundreds."""


class BadJSON(ValueError):
    """The text is not valid JSON. The message is for the model."""


class TooDeep(BadJSON):
    """The value is nested deeper than `MAX_DEPTH`."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


class _RepeatedKey(ValueError):
    """An object has a key twice. Python would keep the last value, and drop what the model wrote before."""


def parse_json(text: str) -> Any:
    """Parse a string that contains one JSON value and nothing else.

    Raises:
        BadJSON: the text is not valid JSON.
    """
    start = len(text) - len(text.lstrip())
    value, end = parse_json_at(text, start)
    if rest := text[end:].lstrip():
        raise BadJSON(_describe(json.JSONDecodeError("Extra data", text, len(text) - len(rest))))
    return value


def parse_json_at(text: str, position: int) -> tuple[Any, int]:
    """Parse the JSON value that starts at `position`. Return it and its end position.

    Raises:
        BadJSON: there is no valid JSON at `position`.

    >>> parse_json_at('call {"n": 5} now', 5)
    ({'n': 5}, 13)
    """
    try:
        value, end = DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise BadJSON(_describe(error)) from error
    except RecursionError as error:
        raise TooDeep from error
    except _RepeatedKey as error:
        raise BadJSON(f"it has the key {error} twice") from error
    except ValueError as error:  # NaN, or thousands of digits
        raise BadJSON("it contains an invalid number") from error
    check_depth(value)
    return value, end


def _describe(error: json.JSONDecodeError) -> str:
    return f"error at line {error.lineno}, column {error.colno}: {error.msg}"


def check_depth(value: Any) -> None:
    """Raise `TooDeep` if a value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return
    raise TooDeep


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _parse_float(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _RepeatedKey(json.dumps(next(name for name, n in counts.items() if n > 1)))
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_parse_float)
