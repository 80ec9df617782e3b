"""Prompts and observations of Fleet tasks."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.images import IMAGE_TYPES
from skyrl_gym.tools.messages import Content, format_tools_prompt
from skyrl_gym.tools.screen import Screen

DONE = "<done>"

INSTRUCTIONS = f"""You complete tasks in the software of a company by calling its tools.

{{context}}{{tools}}

Rules:
- Every reply ends with exactly one tool call or with {DONE}. If the task asks for an answer, write it before {DONE}.
- If a call fails, read its error, correct the arguments or look for another tool; do not repeat the same call.
- Write {DONE} only when the task is complete."""

HINTS = {"fostgres": "Explore the schema of the database before you query it."}
"""Advice by environment."""

FIRST_FACTS = ("LOGGED_IN_USER", "LOGGED_IN_NAME")


def system_prompt(
    env_key: str,
    env_variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    today: datetime.date,
    screen: Screen | None = None,
) -> str:
    """Format the system message. The task's `CURRENT_DATE`, if it has one, replaces today's date.

    `screen` is the screen of a task with screenshots.
    """
    date = env_variables.get("CURRENT_DATE") or today.isoformat()
    names = [name for name in FIRST_FACTS if name in env_variables]
    names += sorted(env_variables.keys() - {*FIRST_FACTS, "CURRENT_DATE"})
    facts = [f"- {name}: {env_variables[name]}" for name in names]
    parts = [f"Today's date is {date}."]
    parts += ["\n".join(["Environment Context:", *facts])] if facts else []
    parts += [HINTS[env_key]] if env_key in HINTS else []
    parts += [screen.description] if screen is not None else []
    context = "".join(f"{part}\n\n" for part in parts)
    return INSTRUCTIONS.format(context=context, tools=format_tools_prompt(tools))


def format_result(result: Any, image_notice: str = "[Image: text models cannot see it]") -> str:
    """Format a tool's result as text: text unchanged, images as a notice, anything else as JSON."""
    if isinstance(result, str):
        return result
    if image_parts(result):
        texts = [image_notice if _is_image(part) else format_result(part) for part in _to_list(result)]
        return "\n".join(filter(None, texts))
    if isinstance(result, Mapping) and result.get("type") == "text":
        return str(result.get("text", ""))
    return json.dumps(result, indent=2, ensure_ascii=False, default=str)


def image_parts(result: Any) -> list[dict[str, Any]]:
    """Return the images of a tool's result as parts of a message."""
    return [dict(part) for part in _to_list(result) if _is_image(part)]


def describe_images(content: Content) -> str:
    """Return a message's content as text, with a notice for each image."""
    if isinstance(content, str):
        return content
    return "".join("[Image]" if _is_image(part) else part["text"] for part in content)


def _to_list(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def is_error(result: Any) -> bool:
    """Return True if a tool reports an error in its result."""
    if isinstance(result, Mapping):
        return bool(result.get("error"))
    return isinstance(result, str) and result.lower().startswith("error:")
