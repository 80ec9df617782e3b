"""Images of a vision-language model: their tokens, and prompts that contain them."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from skyrl_gym.images import EncodedImage
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.inference_engines.hf.kv_memory import KVMemory
from skyrl_train.inference_engines.hf.scheduler import CachedSequence
from skyrl_train.media.processing import ImageProcessor, has_vision, load_image_processor
from skyrl_train.media.spans import ImageSpan
from skyrl_train.models.vision import find_encoder
from tx.models.config import ModelError
from tx.tinker.backends.torch.image_files import decode_image
from tx.tinker.types import ImageInput, PlacedImage, UserError


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


def process_image(processor: ImageProcessor, image: ImageInput) -> tuple[list[int], EncodedImage]:
    """Return an image's tokens, from its first to its last placeholder, and the decoded image.

    Raises:
        UserError: the image cannot be decoded or processed, or it has other than its expected tokens.
    """
    decoded = decode_image(image)
    try:
        tokens = list(processor.process(decoded).filled)
    except DataError as error:
        raise UserError(str(error)) from error
    if image.expected_tokens not in (None, len(tokens)):
        raise UserError(
            f"an image of {decoded.width} x {decoded.height} pixels has expected_tokens={image.expected_tokens}, but "
            f"the model's processor makes {len(tokens)} tokens of it; count from its first to its last placeholder"
        )
    return tokens, decoded


def check_apart(model: PreTrainedModel, images: Sequence[PlacedImage]) -> None:
    """Check that there is text between images, if the model's positions depend on it (M-RoPE).

    Raises:
        UserError: two images touch.
    """
    touching = [second.start for first, second in pairwise(images) if first.end == second.start]
    if touching and hasattr(model.base_model, "get_rope_index"):
        raise UserError(
            f"two images touch at token {touching[0]}; send the text tokens around each image, e.g. <|vision_start|>"
        )


def spans_of(images: Sequence[PlacedImage]) -> list[ImageSpan]:
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
    tokens, spans = sequence.token_ids[:n_tokens], spans_of(images)
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
