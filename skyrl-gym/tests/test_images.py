"""Images in messages: the forms that are read, and the forms that are written."""

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, find_images, parse_parts, read_image, read_parts, to_openai

TEXT = {"type": "text", "text": "Where?"}


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


RED = encode(Image.new("RGB", (4, 3), "red"))


def test_parts_are_parsed_without_their_images_and_then_read(tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, "Where?"]
    assert parse_parts(parts) == [{"type": "image", "image": "a.png"}, TEXT]
    assert parse_parts([{"type": "image"}, TEXT]) == [{"type": "image", "image": None}, TEXT]
    assert parse_parts([TEXT, " There?"]) == "Where? There?"
    (tmp_path / "a.png").write_bytes(RED)
    image = read_image(RED)
    assert (
        read_parts(parts, tmp_path)
        == read_parts(read_parts(parts, tmp_path))
        == [{"type": "image", "image": image}, TEXT]
    )
    with pytest.raises(InvalidAnswer, match='a part of type "image" has no image'):
        read_parts([{"type": "image"}])
    with pytest.raises(InvalidAnswer, match="a part of type 'audio' is neither text nor an image"):
        parse_parts([{"type": "audio"}])


def test_the_representation_identifies_an_image() -> None:
    image = read_image(RED)
    assert repr(image) == f"<image {image.digest}, 4 x 3>"
    assert repr(read_image(RED)) == repr(image) != repr(read_image(encode(Image.new("RGB", (4, 3), "blue"))))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(InvalidAnswer, match=r"^the image 'a.png' has an unknown format; use a PNG or JPEG file$"):
        read_image("a.png", tmp_path)
    with pytest.raises(InvalidAnswer, match=r"^an image has an unknown format"):
        read_image(b"text")


def test_the_rotation_of_a_camera_is_applied() -> None:
    """As transformers and datasets do. Orientation 6: the first row is the right column."""
    image = Image.new("RGB", (16, 8), "red")
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(encode(image, "JPEG", exif=exif)).open().size == (8, 16)


def test_messages_are_written_for_openais_clients() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": read_parts([{"image": RED, "type": "image"}, TEXT])},
    ]
    sent = json.loads(json.dumps(to_openai(messages)))
    assert sent[0] == messages[0]
    assert sent[1]["content"][1] == TEXT
    again = [{**message, "content": read_parts(message["content"])} for message in sent]
    assert again == messages
    assert [type(image) for image in find_images(again)] == [EncodedImage]
