"""Images of a vision-language model: their tokens, and prompts that contain them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from skyrl_gym.images import EncodedImage, hash_content
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.inference_engines.hf.kv_memory import KVMemory
from skyrl_train.inference_engines.hf.scheduler import CachedSequence
from skyrl_train.media.processing import ImageProcessor, has_vision, load_image_processor
from skyrl_train.media.spans import ImageSpan
from skyrl_train.models.vision import find_encoder
from tx.models.config import ModelError
from tx.tinker.backends.torch.image_files import check_format, decode_image
from tx.tinker.types import ImageInput, PlacedImage, UserError

KNOWN_BYTES = 1 << 24
"""Memory for the sizes and tokens of images that were read, e.g. of 3,600 images of 1,024 tokens."""


def load_processor(model: PreTrainedModel) -> ImageProcessor | None:
    """Return the image processor of a model, or None for a text model.

    Raises:
        ModelError: it cannot be loaded, or the model cannot take features of images.
    """
    try:
        find_encoder(model)
        return load_image_processor(model.name_or_path) if has_vision(model.config) else None
    except ConfigError as error:
        raise ModelError(str(error)) from error


class ImageReader:
    """Reads clients' images for a model.

    A content is decoded and processed once, while it is among the last ones that fit into `KNOWN_BYTES`. Requests
    repeat images: the samples of a group show the same ones.
    """

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._known: OrderedDict[str, _KnownImage] = OrderedDict()  # by digest, most recently used last
        self._n_bytes = 0

    def read(self, image: ImageInput) -> tuple[list[int], EncodedImage]:
        """Return an image's tokens, from its first to its last placeholder, and the decoded image.

        Raises:
            UserError: the image cannot be decoded or processed, or it has other than its expected tokens.
        """
        check_format(image)
        digest = hash_content(image.content)
        known = self._known.get(digest) or self._add(digest, image)
        self._known.move_to_end(digest)
        n_tokens = len(known.tokens)
        if image.expected_tokens not in (None, n_tokens):
            raise UserError(
                f"an image of {known.width} x {known.height} pixels has expected_tokens={image.expected_tokens}, but "
                f"the model's processor makes {n_tokens} tokens of it; count from its first to its last placeholder"
            )
        return known.tokens.tolist(), EncodedImage(image.content, digest, known.width, known.height)

    def _add(self, digest: str, image: ImageInput) -> "_KnownImage":
        decoded = decode_image(image)
        try:
            tokens = np.array(self._processor.tokens(decoded).filled, np.int32)
        except DataError as error:
            raise UserError(str(error)) from error
        known = self._known[digest] = _KnownImage(decoded.width, decoded.height, tokens)
        self._n_bytes += known.n_bytes
        while self._n_bytes > KNOWN_BYTES and len(self._known) > 1:
            self._n_bytes -= self._known.popitem(last=False)[1].n_bytes
        return known


@dataclass(frozen=True, slots=True)
class _KnownImage:
    """The size and the tokens of an image, without its content."""

    width: int
    height: int
    tokens: np.ndarray  # (n,) int32

    @property
    def n_bytes(self) -> int:
        return self.tokens.nbytes + 512  # with the objects around them


def check_separated(model: PreTrainedModel, images: Sequence[PlacedImage]) -> None:
    """Check that there is text between images, if the model finds images by the types of tokens.

    Such a model reads images that touch as one: Gemma 3 would let them attend to each other, and Qwen's positions
    (M-RoPE) would be wrong.

    Raises:
        UserError: two images touch.
    """
    encoder = find_encoder(model)
    touching = [second.start for first, second in pairwise(images) if first.end == second.start]
    if touching and encoder is not None and encoder.type_argument is not None:
        raise UserError(
            f"two images touch at token {touching[0]}; send the text tokens around each image, e.g. <|vision_start|>"
        )


def to_spans(images: Sequence[PlacedImage]) -> list[ImageSpan]:
    """Return images as `skyrl_train` represents them."""
    return [ImageSpan(placed.start, placed.end, placed.image) for placed in images]


def read_with_images(
    model: PreTrainedModel, memory: KVMemory, sequence: CachedSequence, images: Sequence[PlacedImage], n_tokens: int
) -> tuple[torch.Tensor, int]:
    """Read the first `n_tokens` of a sequence in one pass, and store their keys and values in its region.

    The model itself computes attention, because tokens of an image may attend to each other. Return the hidden states
    (n, H), and the position of the next token minus `n_tokens`, e.g. -18 after an image of 24 tokens that takes 6
    positions.
    """
    encoder = find_encoder(model)
    assert encoder is not None
    assert sequence.region is not None
    tokens, spans = sequence.token_ids[:n_tokens], to_spans(images)
    input_ids = torch.tensor([tokens], device=model.device)
    for span in spans:  # one by one, so that the features do not depend on the other images of the prompt
        encoder.arguments(input_ids[:, span.start : span.end], [[span.shift(-span.start)]], caches=True)
    positions = encoder.positions(tokens, spans)  # (3, n)
    output = model.base_model(
        **encoder.arguments(input_ids, [spans], caches=True),
        position_ids=None if positions is None else positions[:, None].to(model.device),
        use_cache=True,
    )
    end = sequence.region.start + n_tokens
    for index, layer in enumerate(output.past_key_values.layers):
        new = [tensor[0].transpose(0, 1) for tensor in (layer.keys, layer.values)]  # (n or window, heads, d)
        for pool, added in zip(memory.layer(index, *new), new, strict=True):
            pool[end - len(added) : end] = added
    states: torch.Tensor = output.last_hidden_state[0]
    return states, 0 if positions is None else int(positions.max()) + 1 - n_tokens
