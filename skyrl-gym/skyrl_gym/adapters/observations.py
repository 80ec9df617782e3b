"""Conversion of other ecosystems' observations to chat messages."""

import json
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from skyrl_gym.envs.base_text_env import ConversationType, MessageType
from skyrl_gym.runtime.serialization import to_json_value
from skyrl_gym.tools.messages import Content, append_content

FIELD = re.compile(r"\{(\w+)\}")


def user_message(content: Content) -> MessageType:
    """Wrap an observation in a user message."""
    return {"role": "user", "content": content}


def append_observation(prompt: ConversationType, content: Content) -> ConversationType:
    """Append the first observation to the prompt: to the last message if it is a user message, else as a new message.

    Some chat templates reject two user messages in a row.
    """
    if not content:
        return list(prompt)
    if prompt and prompt[-1]["role"] == "user":
        return [*prompt[:-1], append_content(prompt[-1], content)]
    return [*prompt, user_message(content)]


def format_observation(observation: Any, template: str | None = None) -> str:
    """Format an observation as text.

    `template` is the name of the field to show, or a text with `{field}` in it. A list's fields are `{0}`, `{1}`, ….
    Without a template, a dict with a single text becomes that text, and `format_value` formats everything else.

    Raises:
        ValueError: the observation lacks a field of the template.

    >>> format_observation({"sum": 14, "dealer": 10}, "Your sum is {sum}.")
    'Your sum is 14.'
    >>> format_observation({"sum": 14, "cards": []})
    'sum: 14'
    """
    if template is None:
        return _only_text(observation) or format_value(observation)
    fields = _fields(observation)
    names = FIELD.findall(template)
    for name in names or [template]:
        if name not in fields:
            known = ", ".join(fields) or "no fields"
            raise ValueError(
                f"observation={template!r} has the field {name!r}, but the environment's observation has {known}"
            )
    if not names:
        return format_value(fields[template])
    return FIELD.sub(lambda match: format_value(fields[match[1]]), template)


def format_value(value: Any) -> str:
    """Format a value for reading: a dict as `name: value` lines, a table row by row, other lists as JSON.

    Empty values and None are dropped from dicts. Other types use `str`.
    """
    if isinstance(value, Mapping):
        fields = {str(name): item for name, item in value.items() if not _is_empty(item)}
        return "\n".join(f"{name}:{_after_colon(format_value(item))}" for name, item in fields.items())
    if _is_scalar(value):
        return _scalar(value)
    if _is_table(value):
        return "\n".join(" ".join(map(_scalar, row)) for row in value)
    if _is_row(value):
        return f"[{', '.join(map(_scalar, value))}]"
    if hasattr(value, "tolist"):  # an array
        return format_value(value.tolist())
    return json.dumps(value, ensure_ascii=False, default=_encode_nested) if isinstance(value, Sequence) else str(value)


def _encode_nested(value: Any) -> Any:
    """Convert a value that JSON does not support, inside a JSON list."""
    try:
        return to_json_value(value)
    except TypeError:
        return str(value)


def _fields(observation: Any) -> dict[str, Any]:
    if isinstance(observation, Mapping):
        return {str(name): value for name, value in observation.items()}
    if isinstance(observation, str) or not getattr(observation, "__len__", None):
        return {"observation": observation}
    return {str(i): value for i, value in enumerate(observation)}


def _only_text(observation: Any) -> str | None:
    if not isinstance(observation, Mapping):
        return None
    values = [value for value in observation.values() if not _is_empty(value)]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sequence | Mapping) and not value)


def _after_colon(text: str) -> str:
    return f"\n{text}" if "\n" in text else f" {text}"


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | Real)


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(_is_scalar, value))


def _is_table(value: Any) -> bool:
    """Return True for rows of equal length with numbers or words."""
    if not isinstance(value, Sequence) or not value:
        return False
    return all(_is_row(row) and not isinstance(row, str) for row in value) and len({len(row) for row in value}) == 1


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, Integral) else f"{float(value):.6g}"
