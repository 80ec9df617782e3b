import base64
from typing import Any

import numpy as np
import pytest

from tx.tinker.types import ImageInput, PlacedImage, UserError
from tx.tinker.wire import tinker_pb2 as pb
from tx.tinker.wire.chunks import MAX_IMAGE_TOKENS, chunk_from_json, decode_chunk, join_parts
from tx.tinker.wire.requests import Chunk
from tx.tinker.wire.sample_job import PromptImage, SampleJob, SampleWeights

CONTENT = bytes(range(256))  # its base64 has both "+" and "/"


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (
            {"type": "image_asset_pointer", "location": "x"},
            "image_asset_pointer; send text as .* and images as image with data",
        ),
        ({"type": "image", "format": "png"}, "kind image without data"),
        ({"data": "x"}, "not valid base64"),
        ({"data": "é"}, "not valid base64"),
        ({"type": "encoded_text"}, "without tokens"),
        ({"tokens": [1, 1 << 40]}, "which is not a token"),
    ],
)
def test_invalid_json(chunk: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        chunk_from_json(chunk, "prompt")


@pytest.mark.parametrize(
    ("image", "words"),
    [
        *((pb.Image(expected_tokens=n), f"expected_tokens={n}; use 1 to") for n in (0, -1, MAX_IMAGE_TOKENS + 1)),
        (pb.Image(override_dimensions=pb.ImageSize(width=8, height=8)), "override_dimensions, which are not supported"),
    ],
)
def test_invalid_images(image: pb.Image, words: str) -> None:
    with pytest.raises(UserError, match=words):
        decode_chunk(pb.Chunk(image=image), "prompt")


@pytest.mark.parametrize("has_type", [True, False])
def test_images_in_json(has_type: bool) -> None:
    chunk: dict[str, Any] = {"data": base64.b64encode(CONTENT).decode(), "format": "png", "expected_tokens": 3}
    chunk |= {"type": "image"} if has_type else {}
    assert decode_chunk(chunk_from_json(chunk, ""), "") == ImageInput(CONTENT, "png", 3)


def test_other_dimensions_in_json() -> None:
    fields = {"data": "", "format": "png", "override_dimensions": {"width": 8, "height": 8}}
    chunk = Chunk.model_validate(fields).model_dump()
    with pytest.raises(UserError, match="override_dimensions, which are not supported"):
        decode_chunk(chunk_from_json(chunk, "prompt"), "prompt")


@pytest.mark.parametrize(("expected", "n_read", "n_least"), [(None, 3, 8), (2, 3, 9), (7, 0, 8)])
def test_images_beyond_the_maximum_are_not_read(expected: int | None, n_read: int, n_least: int) -> None:
    read: list[ImageInput] = []

    def read_image(image: ImageInput) -> tuple[list[int], None]:
        read.append(image)
        return [7] * 2, None

    parts = [np.array([1]), *[ImageInput(b"a", "png", expected)] * 100]
    with pytest.raises(UserError, match=f"prompt has at least {n_least} tokens; the maximum is 7"):
        join_parts(parts, read_image, "prompt", max_tokens=7)
    assert len(read) == n_read


def test_parts_are_joined() -> None:
    first, second = ImageInput(b"a", "png", None), ImageInput(b"b", "png", None)
    parts = [first, np.array([1, 2]), second, first]
    tokens, images = join_parts(parts, lambda image: ([7, 8], image.content), "prompt")
    assert tokens.tolist() == [7, 8, 1, 2, 7, 8, 7, 8]
    assert images == (PlacedImage(0, 2, b"a"), PlacedImage(4, 6, b"b"), PlacedImage(6, 8, b"a"))


def test_a_job_keeps_the_bytes_of_images() -> None:
    fields = dict.fromkeys(("max_tokens", "seed", "stop_tokens"))
    fields |= {"n_samples": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop_strings": []}
    fields |= {"wants_prompt_logprobs": False, "n_top_prompt": 0, "n_top_sampled": 0}
    images = [PromptImage(n_before=n, content=CONTENT, format="png", expected_tokens=None) for n in (0, 2, 2)]
    job = SampleJob(weights=SampleWeights(base_model="org/tiny"), prompt=[1, 2, 3], images=images, **fields)
    stored = job.model_dump_json()
    assert len(stored) < 1000 + 3 * len(base64.b64encode(CONTENT))
    again = SampleJob.model_validate_json(stored)
    assert again == job
    tokens, placed = again.read_prompt(lambda image: ([9] * 2, image.content))
    assert tokens == [9, 9, 1, 2, 9, 9, 9, 9, 3]
    assert [(image.start, image.end) for image in placed] == [(0, 2), (4, 6), (6, 8)]
    assert {image.image for image in placed} == {CONTENT}
