"""Images in messages. A message's content may be a list of parts:

    {"role": "user", "content": [{"type": "image", "image": board}, {"type": "text", "text": "Where is the ball?"}]}

The image may be a Pillow image, an array, the bytes of a file, a path or a data URL. `read_parts` also accepts the
parts of OpenAI's, Anthropic's and MCP's messages. Everything becomes an `EncodedImage`. Needs Pillow.
"""

import base64
import binascii
import hashlib
import importlib
import io
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_gym.error import InvalidAnswer
from skyrl_gym.optional import require

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 2**26
"""Larger images are refused: they would take more than 200 MB decoded."""

TEXT_TYPES = ("text", "input_text", "output_text")
IMAGE_TYPES = ("image", "image_url", "input_image")


@dataclass(frozen=True, slots=True, repr=False)
class EncodedImage:
    """The bytes of an image file that can be decoded. Two images with equal `digest` are equal."""

    content: bytes
    digest: str
    width: int
    height: int

    def __repr__(self) -> str:
        return f"<image {self.digest}, {self.width} x {self.height}>"

    def __hash__(self) -> int:
        return hash(self.digest)

    def open(self) -> "Image":
        """Return the decoded image, upright and in RGB. Transparent pixels become white."""
        return _decode(self.content)

    @property
    def mime_type(self) -> str:
        """Type for data URLs, e.g. "image/png"."""
        kind = _import_pillow().open(io.BytesIO(self.content)).get_format_mimetype()
        return str(kind)

    @property
    def file_name(self) -> str:
        """Name of a file with this content, e.g. "0b1f….png"."""
        kind = str(_import_pillow().open(io.BytesIO(self.content)).format).lower()
        return f"{self.digest}.{'jpg' if kind == 'jpeg' else kind}"

    @property
    def data_url(self) -> str:
        """The image as a URL that contains it."""
        return f"data:{self.mime_type};base64,{base64.b64encode(self.content).decode()}"


def is_pillow_image(value: Any) -> bool:
    """Return True for a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def read_image(source: Any, folder: Path | None = None, formats: Sequence[str] | None = None) -> EncodedImage:
    """Return the image in `source`. Relative paths start at `folder`, or else at the working directory.

    Args:
        source: an `EncodedImage`, a Pillow image, an array (height, width, 3) of bytes or the same as nested lists, the
            bytes of a file, a path, a data URL, or the columns "bytes" and "path" that `datasets` writes.
        folder: where relative paths start.
        formats: Pillow's names of the formats to try, e.g. ["PNG", "JPEG"], or None for all that it knows.

    Raises:
        InvalidAnswer: the image cannot be read or decoded, or it has more than `MAX_PIXELS` pixels.
    """
    if isinstance(source, EncodedImage):
        return source
    pillow = _import_pillow()
    if isinstance(source, Mapping) and ("bytes" in source or "path" in source):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, list):
        source = _read_pixels(source)
    if hasattr(source, "__array_interface__") and not is_pillow_image(source):
        try:
            source = pillow.fromarray(source)
        except (TypeError, ValueError) as error:
            raise InvalidAnswer(
                f"an array cannot become an image: {error}; its shape must be (height, width, 3), and its type uint8"
            ) from error
    if is_pillow_image(source):
        file = io.BytesIO()
        source.save(file, "PNG", compress_level=1)
        source = file.getvalue()
    content = source if isinstance(source, bytes | bytearray) else _read_text(source, folder)
    is_path = isinstance(source, str | Path) and not str(source).startswith("data:")
    return _check(bytes(content), f"the image {str(source)!r}" if is_path else "an image", formats)


def hash_content(content: bytes) -> str:
    """Return the digest of an image file."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _check(content: bytes, name: str, formats: Sequence[str] | None) -> EncodedImage:
    """Decode a file, to find out if training can. `name` is for messages."""
    pillow = _import_pillow()
    try:
        with pillow.open(io.BytesIO(content), formats=formats) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise InvalidAnswer(f"{name} has {width} x {height} pixels; scale it to at most {MAX_PIXELS:,}")
            if file.mode.startswith(("I", "F")):  # Pillow would turn nearly all values into white
                raise InvalidAnswer(f"{name} has the mode {file.mode}, with more than 8 bits; convert it to 8 bits")
        width, height = _decode(content, formats).size
    except pillow.UnidentifiedImageError as error:  # its text has an address
        if formats is not None:
            names = " or ".join(formats)
            raise InvalidAnswer(f"{name} cannot be decoded as {names}; send a file that is not damaged") from error
        raise InvalidAnswer(f"{name} has an unknown format; use a PNG or JPEG file") from error
    except (OSError, SyntaxError, ValueError, struct.error, pillow.DecompressionBombError) as error:
        raise InvalidAnswer(f"{name} cannot be decoded: {error}; use a PNG or JPEG file") from error
    return EncodedImage(content, hash_content(content), width, height)


def _decode(content: bytes, formats: Sequence[str] | None = None) -> "Image":
    """Return the image in a file. Cameras write an orientation that viewers apply, and so do we."""
    pillow = _import_pillow()
    image = _import_pillow("ImageOps").exif_transpose(pillow.open(io.BytesIO(content), formats=formats))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    decoded: Image = image.convert("RGB")
    return decoded


def _read_pixels(rows: list[Any]) -> "Image":
    """Return the image in rows of pixels, e.g. `[[[255, 0, 0], [0, 0, 0]]]` for a red and a black one."""
    try:
        pixels = bytes(value for row in rows for pixel in row for value in pixel)
        image: Image = _import_pillow().frombytes("RGB", (len(rows[0]), len(rows)), pixels)
    except (TypeError, ValueError, IndexError) as error:
        raise InvalidAnswer(
            f"a list cannot become an image: {error}; it must have rows of equal length with three bytes per pixel"
        ) from error
    return image


def _read_text(source: Any, folder: Path | None) -> bytes:
    """Return the bytes at a path or in a data URL."""
    if isinstance(source, Path):
        source = str(source)
    if not isinstance(source, str):
        raise InvalidAnswer(
            f"an image is a {type(source).__name__}; give a Pillow image, an array, bytes, a path or a data URL"
        )
    if source.startswith("data:"):
        header, _, text = source.partition(",")
        if not header.endswith(";base64"):
            raise InvalidAnswer(f"the data URL {source[:40]!r} is not in base64; start it with data:image/png;base64,")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise InvalidAnswer(f"the data URL {source[:40]!r} is not valid base64: {error}") from error
    if source.startswith(("http://", "https://")):
        raise InvalidAnswer(f"the image {source[:100]!r} is on the web; download it before training and give its path")
    path = (folder or Path()) / source.removeprefix("file://")
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidAnswer(f"the image {str(path)!r} cannot be read: {error.strerror}") from error


def read_parts(content: Any, folder: Path | None = None) -> str | list[dict[str, Any]]:
    """Return the content of a message as text, or if it has images, as parts of these two forms:

        {"type": "text", "text": "Where is the ball?"}
        {"type": "image", "image": <EncodedImage>}

    Raises:
        InvalidAnswer: a part is neither text nor an image, or its image is missing or cannot be read.
    """
    content = parse_parts(content)
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if part["type"] == "image":
            if part["image"] is None:
                raise InvalidAnswer('a part of type "image" has no image; give it as {"type": "image", "image": …}')
            part = {"type": "image", "image": read_image(part["image"], folder)}
        parts.append(part)
    return parts


def parse_parts(content: Any) -> str | list[dict[str, Any]]:
    """Return the same as `read_parts`, but with images as they are: paths, bytes, data URLs, or None if missing.

    Raises:
        InvalidAnswer: a part is neither text nor an image.
    """
    if not isinstance(content, list | tuple):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif kind in IMAGE_TYPES:
            parts.append({"type": "image", "image": _find_source(part)})
        elif kind in (None, *TEXT_TYPES) and isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise InvalidAnswer(
                f"a part of type {kind or type(part).__name__!r} is neither text nor an image; write "
                '{"type": "text", "text": "…"} or {"type": "image", "image": …}'
            )
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _find_source(part: Mapping[str, Any]) -> Any:
    """Return the image of a part, whoever's form it has, or None if it has none."""
    if isinstance(source := part.get("source"), Mapping):  # Anthropic's
        return f"data:{source.get('media_type')};base64,{source['data']}" if "data" in source else source.get("url")
    if "data" in part:  # MCP's
        return f"data:{part.get('mimeType')};base64,{part['data']}"
    for name in ("image", "image_url", "url", "path", "bytes"):
        if (value := part.get(name)) is not None:
            return value.get("url") if name == "image_url" and isinstance(value, Mapping) else value
    return None


def find_images(messages: Any) -> list[EncodedImage]:
    """Return the images of messages that `read_parts` has read, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part.get("type") == "image"]


def to_openai(messages: Any) -> list[Any]:
    """Return messages that `read_parts` has read in the form of OpenAI's chat completions, with images as data URLs."""
    return [{**message, "content": _to_openai(message.get("content"))} for message in messages]


def _to_openai(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part["image"].data_url}} if part["type"] == "image" else part
        for part in content
    ]


def join_texts(content: Any) -> str:
    """Return the text of a message's content, without its images."""
    if isinstance(content, list | tuple):
        return "".join(part["text"] for part in content if isinstance(part.get("text"), str))
    return str(content)


def _import_pillow(module: str = "Image") -> Any:
    require("PIL", "images", "images in messages")
    return importlib.import_module(f"PIL.{module}")
