"""Images in messages. A message's content may be a list of parts:

    {"role": "user", "content": [{"type": "image", "image": board}, {"type": "text", "text": "Where is the ball?"}]}

The image may be a Pillow image, an array, the bytes of a file, a path or a data URL. `read_parts` also accepts the
parts of OpenAI's, Anthropic's and MCP's messages. Everything becomes an `EncodedImage`. Needs Pillow.
"""

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Mapping
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
        return f"<image {self.digest[:8]}, {self.width} x {self.height}>"

    def __hash__(self) -> int:
        return hash(self.digest)

    def open(self) -> "Image":
        """Return the decoded image, in RGB. Transparent pixels become white."""
        pillow = _import_pillow()
        image = pillow.open(io.BytesIO(self.content))
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
        decoded: Image = image.convert("RGB")
        return decoded

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


def read_image(source: Any, folder: Path | None = None) -> EncodedImage:
    """Return the image in `source`. Relative paths start at `folder`, or else at the working directory.

    Args:
        source: an `EncodedImage`, a Pillow image, an array (height, width, 3) of bytes, the bytes of a file, a path, a
            data URL, or the columns "bytes" and "path" that `datasets` writes.
        folder: where relative paths start.

    Raises:
        InvalidAnswer: the image cannot be read or decoded, or it has more than `MAX_PIXELS` pixels.
    """
    if isinstance(source, EncodedImage):
        return source
    pillow = _import_pillow()
    if isinstance(source, Mapping) and ("bytes" in source or "path" in source):
        source = source.get("bytes") or source.get("path")
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
    try:
        with pillow.open(io.BytesIO(content)) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InvalidAnswer(f"an image has {width} x {height} pixels; scale it to at most {MAX_PIXELS:,}")
            image.load()  # finds truncated files
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise InvalidAnswer(f"an image cannot be decoded: {error}; use a PNG or JPEG file") from error
    return EncodedImage(bytes(content), hashlib.blake2b(content, digest_size=16).hexdigest(), width, height)


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
        InvalidAnswer: a part is neither text nor an image, or its image cannot be read.
    """
    if not isinstance(content, list | tuple):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif kind in IMAGE_TYPES:
            parts.append({"type": "image", "image": read_image(_find_source(part), folder)})
        elif kind in (None, *TEXT_TYPES) and isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise InvalidAnswer(
                f"a message has a part of type {kind or type(part).__name__!r}; write "
                '{"type": "text", "text": "…"} or {"type": "image", "image": …}'
            )
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _find_source(part: Mapping[str, Any]) -> Any:
    """Return the image of a part, whoever's form it has."""
    if isinstance(source := part.get("source"), Mapping):  # Anthropic's
        return f"data:{source.get('media_type')};base64,{source['data']}" if "data" in source else source.get("url")
    if "data" in part:  # MCP's
        return f"data:{part.get('mimeType')};base64,{part['data']}"
    for name in ("image", "image_url", "url", "path", "bytes"):
        if (value := part.get(name)) is not None:
            return value["url"] if name == "image_url" and isinstance(value, Mapping) else value
    raise InvalidAnswer('a part of type "image" has no image; give it as {"type": "image", "image": …}')


def find_images(messages: Any) -> list[EncodedImage]:
    """Return the images of messages that `read_parts` has read, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part.get("type") == "image"]


def _import_pillow() -> Any:
    require("PIL", "images", "images in messages")
    from PIL import Image

    return Image
