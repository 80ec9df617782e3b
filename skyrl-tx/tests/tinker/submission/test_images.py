import pytest

from tx.tinker.config import TxConfig
from tx.tinker.submission import images
from tx.tinker.submission.images import SubmittedImages
from tx.tinker.types import ImageInput, UserError


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> SubmittedImages:
    """Images of a request, of 1,000 pixels each."""
    monkeypatch.setattr(images, "count_pixels", lambda backend, image: 1000)
    return SubmittedImages(TxConfig(base_model="org/tiny"))


def test_repeated_images_count_too(submitted: SubmittedImages) -> None:
    image = ImageInput(b"a", "png", None)
    for _ in range(images.MAX_REQUEST_IMAGES):
        submitted.read(image)
    with pytest.raises(UserError, match="the request has more than 4,096 images; split the request"):
        submitted.read(image)


def test_the_pixels_of_distinct_images_are_limited(submitted: SubmittedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_PIXELS", 2000)
    for content in (b"a", b"b", b"a"):
        submitted.read(ImageInput(content, "png", 1))
    assert submitted.has_all_lengths
    with pytest.raises(UserError, match="have 3,000 pixels in total; the maximum is 2,000; split the request"):
        submitted.read(ImageInput(b"c", "png", None))


def test_expected_tokens_are_limited(submitted: SubmittedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_REQUEST_TOKENS", 7)
    assert submitted.read(ImageInput(b"a", "png", 4)) == ([0] * 4, None)
    assert submitted.read(ImageInput(b"a", "png", None)) == ([], None)
    assert not submitted.has_all_lengths
    with pytest.raises(UserError, match="have 8 tokens in total; the maximum is 7; split the request"):
        submitted.read(ImageInput(b"a", "png", 4))
