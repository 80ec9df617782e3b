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


def hide_placeholders(token_ids: Sequence[int], spans: Spans, placeholder_id: int) -> list[int]:
    """Return the tokens as the trainer reads them: a placeholder outside of images is `TEXT_FOR_PLACEHOLDER`."""
    filled = {i for span in spans for i in range(span.start, span.end)}
    return [
        TEXT_FOR_PLACEHOLDER if token == placeholder_id and i not in filled else token
        for i, token in enumerate(token_ids)
    ]
