"""Parsing of actions in a model's reply: text, numbers, JSON and tool calls."""

import re
from typing import Any

from skyrl_gym.tools.calls import ToolCall, ToolCallError, parse_tool_calls, strip_thoughts
from skyrl_gym.tools.strict_json import BadJSON, TooDeep, parse_json_at

OPENING, CLOSING = "<action>", "</action>"
WHOLE_NUMBER = re.compile(r"(?<![\w.+-])[+-]?[0-9]{1,18}(?!\w|\.[0-9])", re.ASCII)
MAX_FAILURES = 200
"""Maximum number of opening brackets in a reply that start no JSON."""


class ActionError(ValueError):
    """Error for a reply without a valid action. Its message is shown to the model."""


def extract_action(reply: str) -> str:
    """Return the content of a reply's last `<action>` or, without one, all text after the thoughts.

    Raises:
        ActionError: there is no text.

    >>> extract_action("<think>left?</think>I go <action>left</action>.")
    'left'
    """
    text = strip_thoughts(reply)
    _, tag, tagged = text.rpartition(OPENING)
    text = (tagged.partition(CLOSING)[0] if tag else text).strip()
    if not text:
        raise ActionError("Your reply contains no action.")
    return text


def parse_whole_number(text: str) -> int:
    """Return the only whole number in a text.

    Raises:
        ActionError: there is none, or there are several different ones.
    """
    numbers = {int(number) for number in WHOLE_NUMBER.findall(text)}
    if len(numbers) != 1:
        found = "more than one whole number" if numbers else "no whole number"
        raise ActionError(f"Your action contains {found}. Write exactly one, between {OPENING} and {CLOSING}.")
    return numbers.pop()


def parse_json_object(text: str) -> dict[str, Any]:
    """Return the last JSON object in a text, bare or fenced.

    Raises:
        ActionError: there is none.

    >>> parse_json_object('First {"x": 1}, then {"x": 2}.')
    {'x': 2}
    """
    value: dict[str, Any] = _last_json(text, "{", "object")
    return value


def parse_json_array(text: str) -> list[Any]:
    """Return the last JSON array in a text, bare or fenced.

    Raises:
        ActionError: there is none.
    """
    value: list[Any] = _last_json(text, "[", "array")
    return value


def parse_calls(reply: str) -> list[ToolCall]:
    """Return the tool calls in a reply, in order. There may be none.

    Raises:
        ActionError: a call cannot be parsed, or there are too many.
    """
    try:
        return parse_tool_calls(reply)
    except ToolCallError as error:
        raise ActionError(str(error)) from error


def _last_json(text: str, opening: str, name: str) -> Any:
    """Return the last of a text's outermost objects or arrays."""
    found: Any = None
    problem = "your reply contains none"
    n_failures = 0
    position = text.find(opening)
    while position >= 0:
        try:
            found, position = parse_json_at(text, position)
        except TooDeep as error:  # a value nested inside it is no action
            raise ActionError(f"Your action must be a JSON {name}, but it is invalid: {error}.") from error
        except BadJSON as error:
            n_failures += 1
            problem = f"it is invalid: {error}"
            position += 1
        if n_failures > MAX_FAILURES:
            raise ActionError(f"Your action must be a JSON {name}, but your reply has too many brackets.")
        position = text.find(opening, position)
    if found is None:
        raise ActionError(f"Your action must be a JSON {name}, but {problem}.")
    return found
