"""From what a model writes to what it means to do: the text, the number or the JSON of an action."""

from __future__ import annotations

import re
from typing import Any

from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, without_thoughts
from skyrl_gym.tools.strict_json import BadJSON, TooDeep, read_json_at

OPENING, CLOSING = "<action>", "</action>"
WHOLE_NUMBER = re.compile(r"(?<![\w.+-])[+-]?[0-9]{1,18}(?!\w|\.[0-9])", re.ASCII)
MAX_ATTEMPTS = 200
"""Brackets that may turn out not to begin JSON, before a reply is given up."""


class ActionError(ValueError):
    """A reply from which no action can be read; the message is for the model."""


def said(reply: str) -> str:
    """The action in a reply: what its last `<action>` holds, or all that is said after the thoughts.

    Raises:
        ActionError: nothing is said.
    """
    text = without_thoughts(reply)
    _, tag, tagged = text.rpartition(OPENING)
    text = (tagged.partition(CLOSING)[0] if tag else text).strip()
    if not text:
        raise ActionError("Your reply holds no action.")
    return text


def whole_number(text: str) -> int:
    """The only whole number in a text.

    Raises:
        ActionError: there is none, or there are several.
    """
    numbers = {int(number) for number in WHOLE_NUMBER.findall(text)}
    if len(numbers) != 1:
        found = "more than one whole number" if numbers else "no whole number"
        raise ActionError(f"Your action holds {found}. Write exactly one, between {OPENING} and {CLOSING}.")
    return numbers.pop()


def json_object(text: str) -> dict[str, Any]:
    """The last JSON object in a text, bare or fenced.

    Raises:
        ActionError: there is none.
    """
    value: dict[str, Any] = _last_json(text, "{", "object")
    return value


def json_array(text: str) -> list[Any]:
    """The last JSON array in a text, bare or fenced.

    Raises:
        ActionError: there is none.
    """
    value: list[Any] = _last_json(text, "[", "array")
    return value


def calls_in(reply: str) -> list[ToolCall]:
    """The calls of tools in a reply, in order; there may be none.

    Raises:
        ActionError: one cannot be read, or there are too many.
    """
    try:
        return parse_tool_calls(reply)
    except ToolCallError as error:
        raise ActionError(str(error)) from error


def _last_json(text: str, opening: str, name: str) -> Any:
    found: Any = None
    problem = "there is none"
    n_attempts = 0
    position = text.find(opening)
    while position >= 0 and n_attempts < MAX_ATTEMPTS:
        try:
            found, position = read_json_at(text, position)
        except TooDeep as error:  # what is inside it is no action
            raise ActionError(f"Your action must be a JSON {name}, but {error}.") from error
        except BadJSON as error:
            n_attempts += 1
            problem = str(error)
            position += 1
        position = text.find(opening, position)
    if found is None:
        raise ActionError(f"Your action must be a JSON {name}, but {problem}.")
    return found
