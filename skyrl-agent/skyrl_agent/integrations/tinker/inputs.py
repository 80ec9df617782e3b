"""Convert tokens with images to inputs of a Tinker service."""

from collections.abc import Sequence
from typing import Literal

import tinker

from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.media.spans import Spans

FORMATS: dict[str, Literal["png", "jpeg"]] = {"image/png": "png", "image/jpeg": "jpeg"}
"""Formats of files that a service reads."""


def model_input(token_ids: Sequence[int], images: Spans) -> tinker.ModelInput:
    """Return an input in which the file of an image replaces its tokens, from the first to the last placeholder.

    For example, tokens 1 … 9 with an image from 3 to 7 become the text 1 2, the image with 4 expected tokens, and the
    text 7 8 9. The service makes the same tokens of the image. An image that `token_ids` does not include to its end
    stays text.
    """
    chunks: list[tinker.ModelInputChunk] = []
    start = 0
    for span in images:
        if span.end <= len(token_ids):
            chunks += [_text(token_ids[start : span.start]), _image(span.image, span.end - span.start)]
            start = span.end
    chunks.append(_text(token_ids[start:]))
    return tinker.ModelInput(chunks=[chunk for chunk in chunks if chunk.length])


def _text(token_ids: Sequence[int]) -> tinker.EncodedTextChunk:
    return tinker.EncodedTextChunk(tokens=list(token_ids))


def _image(image: EncodedImage, n_tokens: int) -> tinker.types.ImageChunk:
    if image.mime_type not in FORMATS:
        image = read_image(image.open())  # a PNG file with the same pixels
    return tinker.types.ImageChunk(data=image.content, format=FORMATS[image.mime_type], expected_tokens=n_tokens)
