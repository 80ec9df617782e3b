"""Sanitizing of outside text and metadata at the boundary, so that every tokenizer, file and tracker accepts them."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

MAX_DEPTH = 16
"""Maximum nesting of metadata. Deeper values are replaced by a placeholder."""

MAX_ERROR_CHARS = 4000
"""Maximum length of an error's description, as logged and written with its trajectory."""


def clean_text(text: str) -> str:
    r"""Replace lone surrogates: two halves of a pair are joined, a single half becomes "?".

    >>> clean_text("a\ud800b")
    'a?b'
    """
    if text.isascii():
        return str(text)
    try:
        text.encode()
    except UnicodeEncodeError:
        joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return joined.encode("utf-8", "replace").decode("utf-8")
    return str(text)


def clean_strings(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples with every string and key cleaned."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_strings(key): clean_strings(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(clean_strings, value)) if type(value) in (list, tuple) else value
    return value


def describe_error(error: BaseException) -> str:
    """Return an error's type and text: "ValueError: no". Never raises, even if `str(error)` does."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001, the code of an environment
        text = f"its text cannot be read: str() raised {type(failure).__name__}"
    described = f"{type(error).__name__}: {text}"
    return clean_text(described if len(described) <= MAX_ERROR_CHARS else f"{described[:MAX_ERROR_CHARS]} …")


def to_facts(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Convert any value to JSON types: dicts with string keys, lists, numbers, clean strings, booleans and None.

    Arrays become lists, other objects their `str`. Never raises.

    >>> to_facts({1: (2, {3}), "error": ValueError("no")})
    {'1': [2, [3]], 'error': 'no'}
    """
    try:
        if value is None or isinstance(value, bool | float):
            return value
        if isinstance(value, str):
            return clean_text(value)
        if isinstance(value, int):
            return int(value) if value.bit_length() < 1024 else math.copysign(math.inf, 1 if value > 0 else -1)
        if depth == 0:
            return f"<{type(value).__name__}, nested too deeply>"
        if isinstance(value, Mapping):
            return {_key(key): to_facts(inner, depth - 1) for key, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [to_facts(inner, depth - 1) for inner in value]
        if isinstance(value, Real):
            return float(value)
        if hasattr(value, "tolist"):  # numpy arrays and tensors
            return to_facts(value.tolist(), depth - 1)
        return clean_text(str(value))
    except Exception:  # noqa: BLE001, the code of an environment
        return f"<unreadable {type(value).__name__}>"


def _key(key: Any) -> str:
    return clean_text(key) if isinstance(key, str) else str(to_facts(key))
