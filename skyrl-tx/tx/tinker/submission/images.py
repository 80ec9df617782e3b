"""Check the images of a request before the engine sees them."""

from tx.tinker.backends.images import count_pixels
from tx.tinker.config import TxConfig
from tx.tinker.types import ImageInput, UserError

MAX_REQUEST_IMAGES = 1 << 12
"""Maximum number of a request's images, repeated ones included. A file may be as small as 70 bytes."""
MAX_REQUEST_PIXELS = 1 << 28
"""Maximum number of pixels of a request's distinct images. A small file may have many pixels."""
MAX_REQUEST_TOKENS = 1 << 24
"""Maximum number of tokens that a request expects of its images."""


class SubmittedImages:
    """Reader of one request's images. It decodes them, and leaves their tokens to the engine."""

    def __init__(self, config: TxConfig) -> None:
        self._backend = config.backend
        self._decoded: set[bytes] = set()  # contents: the samples of a group show the same images
        self._n_images = self._n_pixels = self._n_tokens = 0
        self.has_all_lengths = True
        """True if the client expects a number of tokens of every image. Otherwise, only the engine knows lengths."""

    def read(self, image: ImageInput) -> tuple[list[int], None]:
        """Return as many zeros as the image has expected tokens.

        Raises:
            UserError: the image cannot be decoded, or the backend reads no images, or the request has too many images,
                pixels or tokens of images.
        """
        self._n_images += 1
        if self._n_images > MAX_REQUEST_IMAGES:
            raise UserError(f"the request has more than {MAX_REQUEST_IMAGES:,} images; split the request")
        if image.content not in self._decoded:
            self._decoded.add(image.content)
            self._n_pixels += count_pixels(self._backend, image)
            _check_total(self._n_pixels, "pixels", MAX_REQUEST_PIXELS)
        self.has_all_lengths &= image.expected_tokens is not None
        self._n_tokens += image.expected_tokens or 0
        _check_total(self._n_tokens, "tokens", MAX_REQUEST_TOKENS)
        return [0] * (image.expected_tokens or 0), None


def _check_total(n: int, unit: str, maximum: int) -> None:
    if n > maximum:
        raise UserError(
            f"the request's images have {n:,} {unit} in total; the maximum is {maximum:,}; split the request"
        )
