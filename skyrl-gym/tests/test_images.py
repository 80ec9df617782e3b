"""Images in messages, in every form that people write them in."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, find_images, parse_parts, read_image, read_parts, to_openai
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

RED = Image.new("RGB", (6, 4), "red")


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


PNG = encoded(RED)
WHERE = {"type": "text", "text": "Where?"}
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
BASE64 = base64.b64encode(PNG).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "red.png").write_bytes(PNG)
    return tmp_path


@pytest.mark.parametrize(
    "source",
    [RED, np.asarray(RED), PNG, bytearray(PNG), "red.png", Path("red.png"), URL, {"bytes": PNG, "path": None}],
    ids=["Pillow", "array", "bytes", "bytearray", "path", "Path", "data URL", "datasets"],
)
def test_a_source_of_an_image(source: Any, folder: Path) -> None:
    image = read_image(source, folder)
    assert (image.width, image.height) == (6, 4)
    assert image.open().tobytes() == RED.tobytes()
    assert read_image(image) is image
    assert read_image(image.data_url) == image


def test_a_path_may_be_absolute_or_start_with_file(folder: Path) -> None:
    assert read_image(str(folder / "red.png")) == read_image(f"file://{folder}/red.png") == read_image(PNG)
    assert read_image({"bytes": None, "path": "red.png"}, folder) == read_image(PNG)


def test_equal_files_are_equal_images() -> None:
    assert {read_image(PNG), read_image(URL)} == {read_image(PNG)}
    assert read_image(PNG) != read_image(Image.new("RGB", (6, 4), "blue"))
    assert "\\x" not in repr(read_image(PNG))


@pytest.mark.parametrize(("kind", "suffix"), [("PNG", "png"), ("JPEG", "jpg"), ("GIF", "gif"), ("PPM", "ppm")])
def test_the_name_of_a_file_has_its_digest_and_kind(kind: str, suffix: str) -> None:
    image = read_image(encoded(RED, kind))
    assert image.file_name == f"{image.digest}.{suffix}"


def test_transparent_palette_and_gray_images_become_rgb() -> None:
    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    assert read_image(clear).open().getpixel((0, 0)) == (255, 255, 255)
    for mode in ("L", "P", "1", "LA"):
        assert read_image(RED.convert(mode)).open().mode == "RGB"
    assert read_image(encoded(RED, "JPEG")).mime_type == "image/jpeg"


def test_the_orientation_of_a_photo_is_applied() -> None:
    """Phones write photos sideways, with an orientation in the file."""
    tall = Image.new("RGB", (2, 3), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    file = io.BytesIO()
    tall.save(file, "JPEG", exif=exif)
    image = read_image(file.getvalue())
    assert (image.width, image.height) == image.open().size == (3, 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no image", "an image has an unknown format"),
        (encoded(Image.effect_noise((64, 64), 50))[:1000], "cannot be decoded"),
        (b"", "an image has an unknown format"),
        ("missing.png", "No such file"),
        ("https://example.com/cat.png", "is on the web; download it"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,@@@", "not valid base64"),
        (7, "an image is a int"),
        (None, "an image is a NoneType"),
        (np.zeros((2, 2, 3)), "its type uint8"),
        (Image.new("I;16", (2, 2)), "the mode I;16, with more than 8 bits"),
        (encoded(Image.new("I;16", (2, 2))), "the mode I;16, with more than 8 bits"),
        ({"bytes": None, "path": None}, "an image is a NoneType"),
    ],
)
def test_a_source_without_an_image_is_refused(source: Any, message: str, folder: Path) -> None:
    with pytest.raises(InvalidAnswer, match=message):
        read_image(source, folder)


def test_only_the_given_formats_are_tried() -> None:
    gif = encoded(RED, "GIF")
    assert read_image(gif, formats=["GIF", "PNG"]) == read_image(gif)
    with pytest.raises(InvalidAnswer, match="cannot be decoded as PNG or JPEG; send a file that is not damaged"):
        read_image(gif, formats=["PNG", "JPEG"])


def test_a_tag_of_the_wrong_type_is_refused() -> None:
    """Pillow removes the orientation from the other tags, and fails to write an ImageWidth (0x100) of text."""
    tags = struct.pack("<HHII", 0x112, 3, 1, 6) + struct.pack("<HHII", 0x100, 2, 1, 0)
    file = io.BytesIO()
    RED.save(file, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x02\0" + tags + bytes(4))
    with pytest.raises(InvalidAnswer, match="cannot be decoded: required argument is not an integer"):
        read_image(file.getvalue())


def test_an_image_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_gym.images.MAX_PIXELS", 20)
    with pytest.raises(InvalidAnswer, match="6 x 4 pixels; scale it to at most 20"):
        read_image(PNG)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": RED},
        {"type": "image", "url": URL},
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        {"type": "image", "data": BASE64, "mimeType": "image/png"},
    ],
    ids=["ours", "transformers", "OpenAI", "OpenAI, a string", "responses", "Anthropic", "MCP"],
)
def test_a_part_with_an_image(part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "Look: "}
    parts = read_parts([text, part])
    assert parts[0] == text
    assert isinstance(parts[1]["image"], EncodedImage)
    assert read_parts(parts) == parts


def test_parts_of_text_become_a_string() -> None:
    assert read_parts([{"type": "text", "text": "1 + "}, "2", {"type": "input_text", "text": " = "}]) == "1 + 2 = "
    assert read_parts("text") == "text"
    assert read_parts(None) is None


@pytest.mark.parametrize(
    "part", [{"type": "video", "video": "a.mp4"}, {"type": "text"}, 7, {"type": "image"}, {"type": "text", "text": 5}]
)
def test_a_part_of_another_kind_is_refused(part: Any) -> None:
    with pytest.raises(InvalidAnswer, match=r"is neither text nor an image|has no image"):
        read_parts([part])


def test_images_of_environments_are_read() -> None:
    look = {"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "a\ud800"}]}
    prompt = validate_prompt(([look], {}))
    assert find_images(prompt) == [read_image(RED)]
    assert prompt[0]["content"][1]["text"] == "a?"
    step = {"observations": [look], "reward": 0.0, "done": False, "metadata": {"modified_chat_history": [look]}}
    output = validate_step_output(step)
    assert len(find_images(output["observations"])) == 1
    assert len(find_images(output["metadata"]["modified_chat_history"])) == 1
    with pytest.raises(InvalidAnswer, match="cannot be decoded"):
        validate_prompt(([{"role": "user", "content": [{"type": "image", "image": PNG[:50]}]}], {}))


def test_parts_are_parsed_without_their_images_and_then_read(tmp_path: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}, "Where?"]
    assert parse_parts(parts) == [{"type": "image", "image": "a.png"}, WHERE]
    assert parse_parts([{"type": "image"}, WHERE]) == [{"type": "image", "image": None}, WHERE]
    assert parse_parts([WHERE, " There?"]) == "Where? There?"
    (tmp_path / "a.png").write_bytes(PNG)
    image = read_image(PNG)
    assert (
        read_parts(parts, tmp_path)
        == read_parts(read_parts(parts, tmp_path))
        == [{"type": "image", "image": image}, WHERE]
    )
    with pytest.raises(InvalidAnswer, match='a part of type "image" has no image'):
        read_parts([{"type": "image"}])
    with pytest.raises(InvalidAnswer, match="a part of type 'audio' is neither text nor an image"):
        parse_parts([{"type": "audio"}])


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(InvalidAnswer, match=r"^the image 'a.png' has an unknown format; use a PNG or JPEG file$"):
        read_image("a.png", tmp_path)
    with pytest.raises(InvalidAnswer, match=r"^an image has an unknown format"):
        read_image(b"text")


def test_messages_are_written_for_openais_clients() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": read_parts([{"image": PNG, "type": "image"}, WHERE])},
    ]
    sent = json.loads(json.dumps(to_openai(messages)))
    assert sent[0] == messages[0]
    assert sent[1]["content"][1] == WHERE
    again = [{**message, "content": read_parts(message["content"])} for message in sent]
    assert again == messages
    assert [type(image) for image in find_images(again)] == [EncodedImage]
