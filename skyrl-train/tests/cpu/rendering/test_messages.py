from typing import Any

import pytest
from train_kit.messages import assistant, user

from skyrl_train.errors import DataError
from skyrl_train.rendering.messages import prepare_messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("message", "prepared"),
    [
        (user([{"type": "text", "text": "What "}, {"type": "text", "text": "is it?"}]), "What is it?"),
        (user(["What ", {"type": "input_text", "text": "is it?"}]), "What is it?"),
        ({"role": "assistant", "content": [{"type": "text", "text": "4", "image_url": None}]}, "4"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": "a", "images": []}, "a"),
    ],
)
def test_content_is_one_string(message: dict[str, Any], prepared: str) -> None:
    assert prepare_messages([message])[0]["content"] == prepared


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            user([{"type": "image_url", "image_url": {"url": "a.png"}}]),
            "the image 'a.png' cannot be read: No such file",
        ),
        (user([{"type": "text", "text": "?"}, {"type": "image"}]), "a part of type .image. has no image"),
        (user([{"type": "input_audio", "input_audio": {}}]), "a part of type 'input_audio'"),
        (user([7]), "a part of type 'int'"),
        ({"role": "user", "content": "?", "images": ["a.png"]}, "has images beside its content; write them in"),
        ({"role": "user", "content": "?", "audio": {"id": "x"}}, "has audio, which models here do not read"),
        *(({"role": "tool", "content": content}, "which is not text") for content in (5, 0, True, {"temp": 20})),
    ],
)
def test_media_and_contents_without_text_are_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=f"message 1:? .*{reason}"):
        prepare_messages([assistant("Hi"), message])
