"""JSON in what a model writes: numbers that JSON has, and no deeper than what is handed on to others may be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 64
"""Lists and objects inside one another. What reads or writes JSON recursively gives up at some hundreds."""


class BadJSON(ValueError):
    """A text that is no JSON; the message is for the model."""


class TooDeep(BadJSON):
    """Lists and objects inside one another, more than `MAX_DEPTH`."""

    def __init__(self) -> None:
        super().__init__("it is nested too deeply")


def read_json(text: str) -> Any:
    """What a text stands for, which is JSON and nothing else.

    Raises:
        BadJSON: it is not.
    """
    begin = len(text) - len(text.lstrip())
    value, end = read_json_at(text, begin)
    if rest := text[end:].lstrip():
        raise BadJSON(_broken(json.JSONDecodeError("Extra data", text, len(text) - len(rest))))
    return value


def read_json_at(text: str, position: int) -> tuple[Any, int]:
    """The value that begins at `position`, and where it ends.

    Raises:
        BadJSON: there is none.
    """
    try:
        value, end = DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise BadJSON(_broken(error)) from error
    except RecursionError as error:
        raise TooDeep from error
    except ValueError as error:  # NaN, or thousands of digits
        raise BadJSON("a number in it cannot be read") from error
    _check_depth(value)
    return value, end


def _broken(error: json.JSONDecodeError) -> str:
    return f"it breaks at line {error.lineno}, column {error.colno}: {error.msg}"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise TooDeep


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that JSON has")


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
