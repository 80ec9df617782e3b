"""Check the images of a request before the engine sees them."""

from tx.tinker.backends.factory import count_pixels
from tx.tinker.config import TxConfig
from tx.tinker.types import ImageInput, UserError

MAX_PIXELS, MAX_TOKENS = 1 << 28, 1 << 24
"""Maximum of all images of a request, since a few bytes may hold many pixels or expect many tokens."""


class SubmittedImages:
    """Reader of one request's images. It decodes them, and leaves their tokens to the engine."""

    def __init__(self, config: TxConfig) -> None:
        self._backend = config.backend
        self._decoded: set[bytes] = set()  # contents: the samples of a group show the same images
        self._n_pixels = self._n_tokens = 0
        self.are_counted = True
        """True if the client expects a number of tokens of every image. Otherwise, only the engine knows lengths."""

    def __call__(self, image: ImageInput) -> tuple[list[int], None]:
        """Return as many zeros as the image has expected tokens.

        Raises:
            UserError: the image cannot be decoded, or the backend reads no images, or there are too many.
        """
        if image.content not in self._decoded:
            self._decoded.add(image.content)
            self._n_pixels += count_pixels(self._backend, image)
            if self._n_pixels > MAX_PIXELS:
                raise UserError(f"images of {self._n_pixels} pixels are more than {MAX_PIXELS}; split the request")
        self.are_counted &= image.expected_tokens is not None
        self._n_tokens += image.expected_tokens or 0
        if self._n_tokens > MAX_TOKENS:
            raise UserError(f"images of {self._n_tokens} tokens are more than {MAX_TOKENS}; split the request")
        return [0] * (image.expected_tokens or 0), None
