"""Images of dataset rows: in parts of messages, or in a column `images` or `image`.

Rows are read in two steps, because the images of a dataset may not fit into memory:

    row              {"images": ["ball.png"]}, "<image>Where is the ball?"
    place_images     [{"type": "image", "image": "ball.png"}, {"type": "text", "text": "Where is the ball?"}]
    read_images      [{"type": "image", "image": <EncodedImage>}, {"type": "text", "text": "Where is the ball?"}]

`place_images` runs whenever a row is read, so also for the checks before training. `read_images` decodes the images. It
runs after the tokenizer is loaded, when prompts are measured, and when a row is drawn.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skyrl_gym.data.files import Row
from skyrl_gym.error import InvalidAnswer, UnreadableData
from skyrl_gym.images import parse_parts, read_parts

IMAGE_FIELDS = ("image", "images")
"""Columns with images. A message has its images in its content."""

MARKER = "<image>"
"""Stands for an image of the column in verl's rows."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")

Messages = list[dict[str, Any]]

FindTextModel = Callable[[], str | None]
"""Returns the path of the model if it reads only text. Called only for rows with images."""


def place_prompt_images(row: Row, location: str, prompt_key: str, find_text_model: FindTextModel) -> None:
    """Parse the parts of a row's prompt, and move the images of its column there. Raises as `place_images` does."""
    contents = [message["content"] for message in row[prompt_key]]
    column, images = _find_column(row, location)
    if not images and not any(isinstance(content, list) for content in contents):
        return
    messages = []
    for index, message in enumerate(row[prompt_key]):
        try:
            messages.append({**message, "content": parse_parts(message["content"])})
        except InvalidAnswer as error:
            raise UnreadableData(f"{location}: message {index}: {error}") from error
    row[prompt_key] = place_images(messages, row, location, prompt_key, find_text_model)
    if images:
        del row[column]  # the environment gets them with the prompt


def place_images(
    messages: Messages, row: Row, location: str, messages_key: str, find_text_model: FindTextModel
) -> Messages:
    """Return parsed messages with the images of the row's column.

    They replace, in order, parts {"type": "image"} without an image, and each `MARKER` in text. If there are neither,
    they come before the text of the first user message.

    Raises:
        UnreadableData: the model reads only text, or there are not as many images as places for them.
    """
    column, images = _find_column(row, location)
    if not images and not any(_image_parts(messages)):
        return messages
    if (model := find_text_model()) is not None:
        raise UnreadableData(
            f"{location} has images in the column {column or messages_key!r}, but {model} reads only text; use a "
            "vision-language model, or remove the images"
        )
    if images:
        messages = [_split_at_markers(message) for message in messages]
        if not any(_image_parts(messages)):
            messages = _open_with_places(messages, len(images))
    n_places = sum(part["image"] is None for part in _image_parts(messages))
    if n_places != len(images):
        if not images:
            raise UnreadableData(
                f'{location} has {n_places} parts {{"type": "image"}} without an image, and no column images; write '
                '{"type": "image", "image": …}, or add the column'
            )
        raise UnreadableData(
            f"{location} has {len(images)} images in the column {column!r}, but its messages have {n_places} places "
            f'for them; write one part {{"type": "image"}} or one {MARKER} for each'
        )
    sources = iter(images)
    return [{**message, "content": _fill(message["content"], sources)} for message in messages]


def read_images(messages: Messages, location: str, folder: Path | None) -> Messages:
    """Return messages with their images read. A relative path starts at `folder`, or at the working directory.

    Raise UnreadableData if an image cannot be read or decoded, or is too large.
    """
    if not any(_image_parts(messages)):
        return messages
    read_messages = []
    for index, message in enumerate(messages):
        try:
            read_messages.append({**message, "content": read_parts(message["content"], folder)})
        except InvalidAnswer as error:
            raise UnreadableData(f"{location}: message {index}: {error}") from error
    return read_messages


def _find_column(row: Row, location: str) -> tuple[str, list[Any]]:
    """Return the name of the row's column with images, and the images, or ("", []) if there are none."""
    found = [(name, images) for name in IMAGE_FIELDS if (images := _list_images(row.get(name)))]
    if len(found) > 1:
        raise UnreadableData(f"{location} has images in the columns {' and '.join(IMAGE_FIELDS)}; remove one of them")
    return found[0] if found else ("", [])


def _list_images(value: Any) -> list[Any]:
    """Return the images in a column. Other text is none: coding tasks store the name of a container in `image`."""
    if isinstance(value, list | tuple):
        return [image for image in value if image is not None]
    is_other_text = isinstance(value, str) and not value.startswith("data:") and not value.lower().endswith(SUFFIXES)
    return [] if value is None or is_other_text else [value]


def _image_parts(messages: Messages) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            yield from (part for part in content if part["type"] == "image")


def _split_at_markers(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with an image part in place of each marker in its text. Assistants write no images."""
    content = message["content"]
    if not isinstance(content, str) or MARKER not in content or message["role"] == "assistant":
        return message
    first, *rest = content.split(MARKER)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for text in rest:
        parts += [{"type": "image", "image": None}, {"type": "text", "text": text}]
    return {**message, "content": [part for part in parts if part != {"type": "text", "text": ""}]}


def _open_with_places(messages: Messages, n_images: int) -> Messages:
    """Return messages of text with places for images before the text of the first user message, if there is one."""
    index = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return messages
    places = [{"type": "image", "image": None}] * n_images
    content = [*places, {"type": "text", "text": messages[index]["content"] or ""}]
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


def _fill(content: Any, sources: Iterator[Any]) -> Any:
    """Return a content with the next images in its empty places."""
    if not isinstance(content, list):
        return content
    is_place = [part["type"] == "image" and part["image"] is None for part in content]
    return [{**part, "image": next(sources)} if empty else part for part, empty in zip(content, is_place, strict=True)]
