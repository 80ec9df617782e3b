"""Parsing of a model's reply as an action of a Gymnasium space: a name, a number, text, or JSON."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from skyrl_gym.adapters.actions import (
    CLOSING,
    OPENING,
    ActionError,
    extract_action,
    parse_json_array,
    parse_json_object,
    parse_whole_number,
)
from skyrl_gym.adapters.observations import format_value
from skyrl_gym.tools.strict_json import BadJSON, parse_json

MAX_CHARSET = 100
"""Maximum size of a text space's character set to list in the instructions."""


class ActionReader:
    """Parser of replies as actions of one space."""

    def __init__(self, space: Space[Any], names: Sequence[str] = ()) -> None:
        """`names` are the actions of a `Discrete` space, in order.

        Raises:
            ValueError: elements of the space cannot be written as text or JSON, or the names do not fit it.
        """
        _check(space)
        if names and (not isinstance(space, spaces.Discrete) or len(names) != space.n):
            raise ValueError(f"action_names={list(names)} do not fit {space}; use one name per action of a Discrete")
        self.space = space
        self.names = [str(name) for name in names]
        self._folded = [name.casefold() for name in self.names]
        mentions = "|".join(re.escape(name) for name in sorted(self._folded, key=len, reverse=True))
        self._mention = re.compile(rf"(?<!\w)(?:{mentions})(?!\w)") if names else None

    @property
    def instructions(self) -> str:
        """Description of the valid actions, for the model."""
        if isinstance(self.space, spaces.Text):
            return f"Write your action between {OPENING} and {CLOSING}: {_describe(self.space)}."
        if self.names:
            start = int(self.space.start)  # type: ignore[attr-defined]
            allowed = "one of " + ", ".join(f"{name} ({number})" for number, name in enumerate(self.names, start))
        else:
            allowed = _describe(self.space)
        return f"Write your action between {OPENING} and {CLOSING}: {allowed}."

    def read(self, reply: str) -> Any:
        """Return the action in a reply.

        Raises:
            ActionError: the reply has no action, or one outside the space.
        """
        text = extract_action(reply)
        if isinstance(self.space, spaces.Discrete):
            folded = text.casefold()
            mentioned = set(self._mention.findall(folded)) if self._mention else set()
            if folded in self._folded:
                mentioned = {folded}
            if len(mentioned) > 1:
                raise ActionError("Your action names more than one.")
            if mentioned:
                return self._folded.index(mentioned.pop()) + int(self.space.start)
            return int(_from_json(self.space, parse_whole_number(text)))
        if isinstance(self.space, spaces.Text):
            return _from_json(self.space, text)
        if isinstance(self.space, spaces.Dict):
            return _from_json(self.space, parse_json_object(text))
        if self.space.shape in ((), (1,)) and "[" not in text:
            return _from_json(self.space, _number(text))
        return _from_json(self.space, parse_json_array(text))


def _check(space: Space[Any]) -> None:
    if isinstance(space, spaces.Dict):
        for part in space.spaces.values():
            _check(part)
    elif isinstance(space, spaces.Tuple):
        for part in space.spaces:
            _check(part)
    elif not isinstance(space, tuple(_READERS)):
        raise ValueError(f"actions of the space {space} cannot be written as text or JSON; wrap the environment")


def _from_json(space: Space[Any], value: Any) -> Any:
    """Convert a JSON value to an element of the space. Raises ActionError if it is not one."""
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            raise ActionError(f"Your action must be an object with the fields {', '.join(space.spaces)}.")
        return {name: _from_json(part, value[name]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ActionError(f"Your action must be an array of {len(space.spaces)} values.")
        return tuple(_from_json(part, item) for part, item in zip(space.spaces, value, strict=True))
    kind = next(kind for kind in _READERS if isinstance(space, kind))
    action = _READERS[kind](space, value)
    if action is None or not space.contains(action):
        raise ActionError(f"Your action must be {_describe(space)}.")
    return action


def _integer(space: Any, value: Any) -> Any:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return np.int64(value) if is_integer and space.start <= value < space.start + space.n else None


def _text(space: Any, value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _array(space: Any, value: Any) -> Any:
    """Convert a value to an array of the space's shape and type. Return None if that is impossible."""
    try:
        array = np.asarray(value)
    except ValueError:  # its rows differ in length
        return None
    allowed = "if" if space.dtype.kind == "f" else "ib" if isinstance(space, spaces.MultiBinary) else "i"
    if array.dtype.kind not in allowed or array.size != int(np.prod(space.shape)):
        return None
    if array.shape != space.shape and space.shape not in ((), (1,)):
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(space.dtype).reshape(space.shape)
    is_whole = space.dtype.kind == "f" or bool((cast == array.reshape(space.shape)).all())
    return cast if is_whole and bool(np.isfinite(cast).all()) else None


_READERS: dict[type[Space[Any]], Callable[[Any, Any], Any]] = {
    spaces.Discrete: _integer,
    spaces.Text: _text,
    spaces.Box: _array,
    spaces.MultiDiscrete: _array,
    spaces.MultiBinary: _array,
}


def _number(text: str) -> Any:
    try:
        return parse_json(text)
    except BadJSON as error:
        raise ActionError("Your action must be a number.") from error


def _describe(space: Any) -> str:
    """Describe the elements of a space."""
    if isinstance(space, spaces.Dict):
        parts = ", ".join(f"{json.dumps(name)}: {_describe(part)}" for name, part in space.spaces.items())
        return f"a JSON object {{{parts}}}"
    if isinstance(space, spaces.Tuple):
        return f"a JSON array [{', '.join(_describe(part) for part in space.spaces)}]"
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        charset = f", only of {''.join(sorted(space.character_set))}" if len(space.character_set) <= MAX_CHARSET else ""
        return f"a text of {space.min_length} to {space.max_length} characters{charset}"
    number = "number" if space.dtype.kind == "f" else "whole number"
    if not space.shape:
        return f"one {number}{_bounds(space)}"
    nested = "nested " if len(space.shape) > 1 else ""
    return f"a {nested}JSON array of {' x '.join(map(str, space.shape))} {number}s{_bounds(space)}"


def _bounds(space: Any) -> str:
    if isinstance(space, spaces.MultiBinary):
        return ", 0 or 1"
    if isinstance(space, spaces.MultiDiscrete):
        low, high = space.start, space.start + space.nvec - 1
    else:
        low, high = space.low, space.high
    if low.size and (low == low.flat[0]).all() and (high == high.flat[0]).all():
        return f" from {format_value(low.flat[0])} to {format_value(high.flat[0])}"
    return f" from {format_value(low)} to {format_value(high)}"
