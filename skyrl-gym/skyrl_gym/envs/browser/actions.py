"""Actions in the format of Qwen's models for computer use.

{"name": "computer", "arguments": {"action": "left_click", "coordinate": [320, 200]}}
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skyrl_gym.adapters.actions import ActionError
from skyrl_gym.tools.arguments import convert_arguments
from skyrl_gym.tools.calls import ToolCall
from skyrl_gym.tools.screen import Screen

TOOL_NAMES = ("computer", "computer_use")
MAX_TEXT_CHARS = 1000
MAX_SCROLL_PIXELS = 10_000
MAX_WAIT_S = 1.0
STATUSES = ("success", "failure")

KEYS = {
    "enter": "Enter",
    "tab": "Tab",
    "space": "Space",
    "backspace": "Backspace",
    "delete": "Delete",
    "escape": "Escape",
    "home": "Home",
    "end": "End",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "pageup": "PageUp",
    "pagedown": "PageDown",
}
"""Playwright's names of keys."""

ALIASES = {"return": "enter", "esc": "escape", "del": "delete", "pgup": "pageup", "pgdn": "pagedown"}
CONTROL_KEYS = ("a", "z")
"""Keys that may be pressed with ctrl. Copy and paste are left out: all episodes of a process share a clipboard."""


def describe_tool(screen: Screen) -> dict[str, Any]:
    """Return the tool's schema in the format of the OpenAI API."""
    properties = {
        "action": {
            "type": "string",
            "enum": list(ACTIONS),
            "description": "left_click: click at coordinate. type: write text into the field with the focus. "
            "key: press keys. scroll: scroll the page by pixels. wait: look again. terminate: end the task.",
        },
        "coordinate": {"type": "array", "items": {"type": "number"}, "description": "[x, y], for left_click"},
        "text": {"type": "string", "description": "for type"},
        "keys": {
            "type": "array",
            "items": {"type": "string"},
            "description": 'pressed together, for key: ["enter"], ["shift", "tab"], ["ctrl", "a"]',
        },
        "pixels": {"type": "number", "description": "for scroll: positive scrolls up, negative scrolls down"},
        "time": {"type": "number", "description": "seconds, for wait"},
        "status": {"type": "string", "enum": list(STATUSES), "description": "for terminate"},
        "answer": {"type": "string", "description": "for terminate, if the task asks for one"},
    }
    function = {
        "name": TOOL_NAMES[0],
        "description": f"Use a mouse and a keyboard to operate a web page. {screen.description}",
        "parameters": {"type": "object", "properties": properties, "required": ["action"]},
    }
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Click:
    """A click with the left button, in pixels."""

    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Type:
    """Text for the field with the focus."""

    text: str


@dataclass(frozen=True, slots=True)
class Press:
    """A key under Playwright's name, e.g. "Control+a"."""

    key: str


@dataclass(frozen=True, slots=True)
class Scroll:
    """A scroll of the page. Positive pixels scroll down, as in the browser."""

    pixels: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A pause."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Terminate:
    """The end of the episode."""

    status: str
    answer: str | None


Action = Click | Type | Press | Scroll | Wait | Terminate


def parse_action(call: ToolCall, screen: Screen) -> Action:
    """Return the action of a tool call. Raise ActionError, with a message for the model, if there is none."""
    if call.name not in TOOL_NAMES:
        raise ActionError(f"There is no tool {call.name!r}; call {TOOL_NAMES[0]}.")
    arguments = convert_arguments(call.arguments, describe_tool(screen)["function"]["parameters"])
    parse = ACTIONS.get(str(arguments.get("action")))
    if parse is None:
        raise ActionError(f"action={arguments.get('action')!r} is unknown; use one of {', '.join(ACTIONS)}.")
    return parse(arguments, screen)


def _click(arguments: dict[str, Any], screen: Screen) -> Click:
    try:
        return Click(*screen.to_pixels(arguments.get("coordinate")))
    except ValueError as error:
        raise ActionError(f"{error}.") from error


def _type(arguments: dict[str, Any], screen: Screen) -> Type:
    text = arguments.get("text")
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_CHARS:
        raise ActionError(f"text must have between 1 and {MAX_TEXT_CHARS} characters.")
    return Type(text)


def _press(arguments: dict[str, Any], screen: Screen) -> Press:
    keys = arguments.get("keys") or arguments.get("key") or arguments.get("text")
    names = keys.split("+") if isinstance(keys, str) else keys
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ActionError('keys must be a list of names, e.g. ["enter"].')
    *modifiers, name = (_normalize_key(name) for name in names)
    key = KEYS.get(name) or (name if len(name) == 1 and name.isprintable() else None)
    # Shift and enter on a link would open a window that outlives the episode, because episodes share a browser context.
    is_allowed = {
        (): key is not None,
        ("shift",): name in KEYS and key != "Enter",
        ("ctrl",): name in CONTROL_KEYS,
    }.get(tuple(modifiers), False)
    if not is_allowed:
        raise ActionError(
            f"keys={names} cannot be pressed; use one character, one of {', '.join(KEYS)} (also with shift, except "
            f"enter), or ctrl with {' or '.join(CONTROL_KEYS)}."
        )
    prefix = {"shift": "Shift+", "ctrl": "Control+"}[modifiers[0]] if modifiers else ""
    return Press(f"{prefix}{key}")


def _normalize_key(name: str) -> str:
    if len(name) == 1:
        return name
    name = name.strip().lower().replace("_", "").replace(" ", "").removeprefix("arrow")
    return {"control": "ctrl", **ALIASES}.get(name, name)


def _scroll(arguments: dict[str, Any], screen: Screen) -> Scroll:
    return Scroll(-round(_number(arguments, "pixels", -MAX_SCROLL_PIXELS, MAX_SCROLL_PIXELS)))


def _wait(arguments: dict[str, Any], screen: Screen) -> Wait:
    return Wait(min(MAX_WAIT_S, _number({"time": 1, **arguments}, "time", 0, 3600)))


def _terminate(arguments: dict[str, Any], screen: Screen) -> Terminate:
    status, answer = arguments.get("status"), arguments.get("answer")
    if status not in STATUSES:
        raise ActionError(f"status={status!r} must be {' or '.join(STATUSES)}.")
    return Terminate(status, None if answer is None else str(answer))


def _number(arguments: dict[str, Any], name: str, at_least: float, at_most: float) -> float:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not at_least <= value <= at_most:
        raise ActionError(f"{name}={value!r} must be a number between {at_least} and {at_most}.")
    return float(value)


ACTIONS: dict[str, Callable[[dict[str, Any], Screen], Action]] = {
    "left_click": _click,
    "type": _type,
    "key": _press,
    "scroll": _scroll,
    "wait": _wait,
    "terminate": _terminate,
}
