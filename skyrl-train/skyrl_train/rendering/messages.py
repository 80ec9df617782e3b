"""Prepare messages for chat templates. Imports neither torch nor transformers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from skyrl_gym.data.images import IMAGE_FIELDS
from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import read_parts
from skyrl_gym.tools.calls import parse_arguments
from skyrl_train.errors import DataError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation"})
"""Roles in the templates of published models. Any other role is accepted if the template names it."""

THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that may hold the thought. Qwen's templates read the first, gpt-oss's the last."""

UNREAD_MEDIA = ("video", "videos", "audio", "audios")
"""Columns and fields of media that no model here reads."""


def check_media(row: Mapping[str, Any], location: str) -> None:
    """Raise DataError if a row has a column of videos or audio."""
    for name in UNREAD_MEDIA:
        if row.get(name):
            raise DataError(f"{location} has a column {name!r}, which models here do not read; remove the column")


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], read: Callable[[Any], Any] = read_parts
) -> list[dict[str, Any]]:
    """Return copies of messages in the form that every chat template reads.

    - Null fields are dropped.
    - Arguments of tool calls become objects. Their nulls stay, because the file reader has already dropped the table's.
    - Text parts are joined to one string, because templates disagree on parts. Qwen3's template ignores them. Only a
      message with an image keeps its parts. `read=parse_parts` leaves their images unread.
    - A thought is copied to every field that a template may read, but not to `thinking` if there are content and calls.

    Raise DataError for a video, audio, or a content that is neither text nor an image.
    """
    return [_prepare_message(message, index, read) for index, message in enumerate(messages)]


def _prepare_message(message: Mapping[str, Any], index: int, read: Callable[[Any], Any]) -> dict[str, Any]:
    prepared: dict[str, Any] = parse_arguments(
        {name: value for name, value in message.items() if value is not None or name == "content"}
    )
    if medium := next((name for name in UNREAD_MEDIA if prepared.get(name)), None):
        raise DataError(f"message {index} has {medium}, which models here do not read; remove it")
    if name := next((name for name in IMAGE_FIELDS if prepared.get(name)), None):
        raise DataError(
            f'message {index} has {name} beside its content; write them in the content, as {{"type": "image", '
            '"image": …}'
        )
    content = prepared.get("content")
    if isinstance(content, list):
        try:
            prepared["content"] = read(content)
        except InvalidAnswer as error:
            raise DataError(f"message {index}: {error}") from error
        if isinstance(prepared["content"], list) and prepared["role"] == "assistant":
            raise DataError(f"message {index} is from the assistant and has an image, which no model here writes")
    elif content is None and "tool_calls" in prepared:
        prepared["content"] = ""
    elif content is not None and not isinstance(content, str):  # Qwen3's template writes nothing for it
        raise DataError(f"message {index} has content={repr(content)[:80]}, which is not text; write it as text")
    if thought := find_thought(prepared):
        # gpt-oss's template reads `thinking`, and raises if a message also has content and tool calls.
        adds_thinking = not (prepared.get("content") and prepared.get("tool_calls"))
        prepared |= {name: thought for name in THOUGHT_FIELDS if name != "thinking" or adds_thinking}
    return prepared


def find_thought(message: Mapping[str, Any]) -> str | None:
    """Return the thought in a field of a message, or None."""
    return next((str(message[name]) for name in THOUGHT_FIELDS if message.get(name)), None)


def get_function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call, in OpenAI's form or without the level `function`."""
    return cast(Mapping[str, Any], call.get("function", call))


def replace_function(call: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a copy of a tool call with another name or other arguments."""
    function = {**get_function(call), **fields}
    return {**call, "function": function} if "function" in call else function


@dataclass(frozen=True, slots=True)
class CallForm:
    """The format that a template expects of tool calls: arguments as text or object, empty content as null or ''."""

    arguments_are_text: bool  # DeepSeek V3's and R1's templates concatenate them, so they must be JSON text
    content_is_null: bool  # the same templates write calls only if the content is null

    def write(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return prepared messages in this form. DataError if it cannot hold both the content and the calls of one."""
        written = []
        for index, message in enumerate(messages):
            copy = dict(message)
            if copy.get("tool_calls"):
                if self.arguments_are_text:
                    copy["tool_calls"] = [_write_arguments(call) for call in copy["tool_calls"]]
                if self.content_is_null:
                    if copy["content"]:
                        raise DataError(
                            f"message {index} has content and tool calls, but the chat template writes only one of "
                            "them; remove the content"
                        )
                    copy["content"] = None
            written.append(copy)
        return written


CALL_FORMS = tuple(CallForm(is_text, is_null) for is_null in (False, True) for is_text in (False, True))
"""Forms that templates of published models expect. Most expect the first."""


def _write_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = get_function(call).get("arguments", {})
    if isinstance(arguments, str):
        return call
    return replace_function(call, arguments=json.dumps(arguments, ensure_ascii=False))
