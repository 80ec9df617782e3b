"""Decode the chunks of clients' inputs: tokens of text, and images.

An image stands for the tokens that the model's processor makes of it, from its first to its last placeholder. Tokens
before and after them, such as `<|vision_start|>`, are text, which clients send.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tx.tinker.types import ImageInput, PlacedImage, ReadImage, UserError
from tx.tinker.wire import tinker_pb2 as pb
from tx.tinker.wire.tensors import INT32_RANGE

MAX_IMAGE_TOKENS = 1 << 16
"""Maximum number of tokens of an image."""
KINDS = "send text as encoded_text with tokens, and images as image with data"

Part = np.ndarray | ImageInput
"""A decoded chunk: tokens (n,) int32, or an image."""


def chunk_from_json(fields: Mapping[str, Any], name: str) -> pb.Chunk:
    """Convert a JSON chunk, `{tokens}` or `{data, format, expected_tokens?}`. Older clients omit its `type`.

    Raises:
        UserError: the chunk is of another kind or lacks its content, or a token is not an int32.
    """
    tokens, data = fields.get("tokens"), fields.get("data")
    kind = fields.get("type") or ("image" if tokens is None else "encoded_text")
    if kind == "image" and data is not None:
        try:
            image = pb.Image(data=base64.b64decode(data), format=fields.get("format") or "")
        except (binascii.Error, ValueError) as error:
            raise UserError(f"{name} has an image whose data is not valid base64: {error}") from error
        if (expected := fields.get("expected_tokens")) is not None:
            image.expected_tokens = expected
        if fields.get("override_dimensions") is not None:
            image.override_dimensions.SetInParent()  # `decode_chunk` rejects any
        return pb.Chunk(image=image)
    if kind != "encoded_text":
        raise UserError(f"{name} holds a chunk of kind {kind}{' without data' * (kind == 'image')}; {KINDS}")
    if tokens is None:
        raise UserError(f"{name} has a chunk without tokens; pass a list, which may be empty")
    if tokens and not (INT32_RANGE[0] <= min(tokens) and max(tokens) <= INT32_RANGE[1]):
        raise UserError(f"{name} has {max(tokens, key=abs)}, which is not a token")
    return pb.Chunk(encoded_text=pb.EncodedText(tokens=np.asarray(tokens, dtype="<i4").tobytes()))


def decode_chunk(chunk: pb.Chunk, name: str) -> Part:
    """Decode a chunk. The image in it is not read.

    Raises:
        UserError: the chunk is neither text nor an image, or its size is wrong.
    """
    kind, packed = chunk.WhichOneof("chunk"), chunk.encoded_text.tokens
    if kind == "image":
        image = chunk.image
        expected = image.expected_tokens if image.HasField("expected_tokens") else None
        if expected is not None and not 1 <= expected <= MAX_IMAGE_TOKENS:
            raise UserError(f"{name} has an image with expected_tokens={expected}; use 1 to {MAX_IMAGE_TOKENS}")
        if image.HasField("override_dimensions"):
            raise UserError(f"{name} has an image with override_dimensions, which are not supported; scale the image")
        return ImageInput(image.data, image.format, expected)
    if kind != "encoded_text":
        raise UserError(f"{name} holds a chunk of kind {kind}; {KINDS}")
    if len(packed) % 4:
        raise UserError(f"{name} has {len(packed)} bytes of tokens; each token takes 4 bytes")
    return np.frombuffer(packed, "<i4")


def join_parts(
    parts: Iterable[Part], read_image: ReadImage, name: str, max_tokens: int | None = None
) -> tuple[np.ndarray, tuple[PlacedImage, ...]]:
    """Return the tokens (n,) of all parts, and where the images are among them.

    An image is not read if it would end after `max_tokens`, because reading takes time.

    Raises:
        UserError: an image cannot be read, or is beyond `max_tokens`.
    """
    tokens, images, n_tokens = [np.zeros(0, np.int32)], [], 0
    for part in parts:
        added: Sequence[int] | np.ndarray
        if isinstance(part, ImageInput):
            n_least = n_tokens + (part.expected_tokens or 1)
            if max_tokens is not None and n_least > max_tokens:
                raise UserError(f"{name} has at least {n_least} tokens; the maximum is {max_tokens}")
            try:
                added, image = read_image(part)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
            images.append(PlacedImage(n_tokens, n_tokens + len(added), image))
        else:
            added = part
        tokens.append(np.asarray(added, np.int32))
        n_tokens += len(added)
    return np.concatenate(tokens), tuple(images)
