"""From what another ecosystem's environment shows to messages that a model reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from skyrl_gym.envs.base_text_env import ConversationType, MessageType
from skyrl_gym.serialization import plain
from skyrl_gym.tools.messages import extended, readable

FIELD = re.compile(r"\{(\w+)\}")


def user_message(text: str) -> MessageType:
    """An observation as a message of the user."""
    return {"role": "user", "content": text}


def with_observation(prompt: ConversationType, text: str) -> ConversationType:
    """The prompt with the first observation at its end: in the last message, where that is the user's.

    Some chat templates refuse two messages of the user in a row.
    """
    if not text:
        return list(prompt)
    if prompt and prompt[-1]["role"] == "user":
        return [*prompt[:-1], extended(prompt[-1], text)]
    return [*prompt, user_message(text)]


def described(observation: Any, template: str | None = None) -> str:
    """An observation as text.

    `template` is the name of the field that is the text, or a text with `{field}` in it; the fields of a list are
    `{0}`, `{1}`, …. Without one, a dict that holds one text and nothing else is that text; see `as_text` for the rest.

    Raises:
        ValueError: the observation lacks a field of the template.
    """
    if template is None:
        return readable(_only_text(observation) or as_text(observation))
    fields = _fields(observation)
    names = FIELD.findall(template)
    for name in names or [template]:
        if name not in fields:
            known = ", ".join(fields) or "no fields"
            raise ValueError(f"observation={template!r} names {name!r}; what the environment shows has {known}")
    if not names:
        return readable(as_text(fields[template]))
    return readable(FIELD.sub(lambda match: as_text(fields[match[1]]), template))


def as_text(value: Any) -> str:
    """A value as people would write it: a dict as `name: value` lines, a table row by row, other lists as JSON.

    What is empty or None is left out of dicts. What is nothing of that kind is shown as `str` has it.
    """
    if isinstance(value, Mapping):
        fields = {str(name): item for name, item in value.items() if not _is_empty(item)}
        return "\n".join(f"{name}:{_after_colon(as_text(item))}" for name, item in fields.items())
    if _is_scalar(value):
        return _scalar(value)
    if _is_table(value):
        return "\n".join(" ".join(map(_scalar, row)) for row in value)
    if _is_row(value):
        return f"[{', '.join(map(_scalar, value))}]"
    if hasattr(value, "tolist"):  # an array
        return as_text(value.tolist())
    return json.dumps(value, ensure_ascii=False, default=_inner) if isinstance(value, Sequence) else str(value)


def _inner(value: Any) -> Any:
    """What stands in a list of JSON for something else."""
    try:
        return plain(value)
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
    """Rows of equal length, of numbers or words."""
    if not isinstance(value, Sequence) or not value:
        return False
    return all(_is_row(row) and not isinstance(row, str) for row in value) and len({len(row) for row in value}) == 1


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(int(value)) if isinstance(value, Integral) else f"{float(value):.6g}"
