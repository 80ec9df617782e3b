"""Which tokens of a row an image fills."""

from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_gym.images import EncodedImage

TEXT_FOR_PLACEHOLDER = 0
"""Token that a model reads for a placeholder that no image fills."""


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """An image whose placeholder tokens are between `start` and `end` of a row."""

    start: int
    end: int
    image: EncodedImage

    def shift(self, offset: int) -> "ImageSpan":
        """Return the span after `offset` other tokens."""
        return ImageSpan(self.start + offset, self.end + offset, self.image)


Spans = Sequence[ImageSpan]
"""The images of a row, in order."""
