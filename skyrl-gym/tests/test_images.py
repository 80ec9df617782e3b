"""Images in messages, in every form that people write them in."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.images import EncodedImage, find_images, read_image, read_parts
from skyrl_gym.runtime.validation import validate_prompt, validate_step_output

RED = Image.new("RGB", (6, 4), "red")


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


PNG = encoded(RED)
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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no image", "cannot be decoded"),
        (PNG[: len(PNG) // 2], "cannot be decoded"),
        (b"", "cannot be decoded"),
        ("missing.png", "No such file"),
        ("https://example.com/cat.png", "is on the web; download it"),
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64,@@@", "not valid base64"),
        (7, "an image is a int"),
        (None, "an image is a NoneType"),
        (np.zeros((2, 2, 3)), "its type uint8"),
        ({"bytes": None, "path": None}, "an image is a NoneType"),
    ],
)
def test_a_source_without_an_image_is_refused(source: Any, message: str, folder: Path) -> None:
    with pytest.raises(InvalidAnswer, match=message):
        read_image(source, folder)


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
    with pytest.raises(InvalidAnswer, match=r"a part of type|has no image"):
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
        validate_prompt(([{"role": "user", "content": [{"type": "image", "image": b"x"}]}], {}))
