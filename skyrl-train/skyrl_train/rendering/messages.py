"""Messages as chat templates expect them. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.tools.calls import for_template
from skyrl_train.errors import DataError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
"""Roles that templates of published models write. Others are used if the template names them."""

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with the thought before the answer. DeepSeek's and Qwen's templates read the first."""

MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_COLUMNS = ("images", "videos", "audios")


def check_media(row: Mapping[str, Any], location: str) -> None:
    """Raise DataError for a row with a column of images or other media."""
    for name in MEDIA_COLUMNS:
        if isinstance(row.get(name), list) and row[name]:
            raise DataError(f"{location} has {len(row[name])} {name}, which models here do not read; remove the column")


def drop_nulls(value: Any) -> Any:
    """Return a value without the fields that a table fills with null because another row has them.

    `content` of a message stays: OpenAI writes null there beside tool calls.
    """
    if isinstance(value, list):
        return [drop_nulls(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    is_message = "role" in value
    return {
        name: drop_nulls(part) for name, part in value.items() if part is not None or (is_message and name == "content")
    }


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of messages in the form that every chat template reads.

    Fields that are null are dropped. Arguments of tool calls become objects. Nulls inside them are kept, because the
    file reader has already dropped the table's. Text parts are joined into one string: templates disagree on parts, and
    Qwen3's writes none of them.

    Raises:
        DataError: a message has an image, a video or audio.
    """
    return [_prepare(message, index) for index, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None or name == "content"}
    prepared: dict[str, Any] = for_template(given)
    if medium := next((name for name in MEDIA_FIELDS if prepared.get(name)), None):
        raise DataError(f"message {index} has {medium}, which models here do not read; remove it")
    content = prepared.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, str) and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise DataError(
                    f"message {index} has a part of type {kind!r}; models here read text only, so write its content "
                    'as text, or as parts of the form {"type": "text", "text": "…"}'
                )
        prepared["content"] = "".join(part if isinstance(part, str) else part["text"] for part in content)
    elif content is None and "tool_calls" in prepared:
        prepared["content"] = ""
    return prepared
