"""A model's own image processor, and the tokens that stand for an image.

A chat template writes one placeholder for an image. The processor replaces it by as many placeholder tokens as the
model has features for that image, sometimes with tokens around them and between tiles:

    template    <|vision_start|><|image_pad|><|vision_end|>Where is the ball?
    processor   <|vision_start|><|image_pad|><|image_pad|><|image_pad|><|image_pad|><|vision_end|>Where is the ball?

Tokens stay authoritative: a row has the placeholder tokens, and an `ImageSpan` says which of them an image fills. A
model may also sample a placeholder. It is in no span, so it stays an ordinary token.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerBase

from skyrl_gym.images import EncodedImage, read_image
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.media.spans import ImageSpan, Spans

CACHED_BYTES = 2**28
"""Memory for processed images. The samples of a group and the turns of an episode show the same images."""

CACHED_TOKENS = 2**20
"""Maximum number of tokens of images. They take about 30 MB, and outlast the images' tensors."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """The tokens that stand for an image."""

    text: str  # replaces the template's placeholder
    token_ids: tuple[int, ...]  # of the text
    filled: tuple[int, ...]  # tokens from the first to the last placeholder
    n_tokens: int  # placeholder tokens in the text


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as a model reads it."""

    tokens: ImageTokens
    inputs: Mapping[str, torch.Tensor]  # arguments of the model, e.g. "pixel_values" and "image_grid_thw"

    @property
    def n_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


class _Cache(Generic[T]):
    """An LRU cache by digest that several threads use. It keeps at least the last value."""

    def __init__(self, max_size: int, measure: Callable[[T], int]) -> None:
        self._max_size, self._measure = max_size, measure
        self._size = 0
        self._values: OrderedDict[str, T] = OrderedDict()  # most recently used last
        self._lock = Lock()

    def get(self, digest: str) -> T | None:
        with self._lock:
            if digest in self._values:
                self._values.move_to_end(digest)
            return self._values.get(digest)

    def put(self, digest: str, value: T) -> None:
        """Add a value, unless another thread has added it."""
        with self._lock:
            if digest in self._values:
                return
            self._values[digest] = value
            self._size += self._measure(value)
            while self._size > self._max_size and len(self._values) > 1:
                self._size -= self._measure(self._values.popitem(last=False)[1])


class ImageProcessor:
    """The processor of a vision-language model, with the images that it has processed last. Threads may share it."""

    def __init__(self, processor: Any, token_id: int) -> None:
        """`token_id` is the token that features of an image replace."""
        self.token_id = token_id
        self.placeholder: str = processor.image_token
        """Text that a chat template writes for an image."""
        self._reserved = {self.placeholder, processor.tokenizer.convert_ids_to_tokens(token_id)}
        self._processor = processor
        self._processed = _Cache[ProcessedImage](CACHED_BYTES, lambda processed: processed.n_bytes)
        self._tokens = _Cache[ImageTokens](CACHED_TOKENS, lambda tokens: len(tokens.token_ids))

    def save(self, folder: str) -> None:
        """Write the processor's settings."""
        self._processor.save_pretrained(folder)

    def process(self, image: EncodedImage) -> ProcessedImage:
        """Return an image as the model reads it. Raise DataError if the processor rejects it."""
        if (known := self._processed.get(image.digest)) is not None:
            return known
        options = {"return_tensors": "pt", "add_special_tokens": False, "return_text_replacement_offsets": True}
        try:
            output = self._processor(images=[image.open()], text=[self.placeholder], **options)
            (replacement,) = output["text_replacement_offsets"][0]
            token_ids = tuple(output["input_ids"][0].tolist())
            places = [position for position, token in enumerate(token_ids) if token == self.token_id]
            filled = token_ids[places[0] : places[-1] + 1]
        except (TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
            raise DataError(f"the model's processor rejects {image!r}: {error}; scale the image") from error
        text_inputs = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
        inputs = {name: tensor for name, tensor in output.items() if name not in text_inputs}
        text = str(replacement["replacement"])
        tokens = ImageTokens(text=text, token_ids=token_ids, filled=filled, n_tokens=len(places))
        processed = ProcessedImage(tokens, inputs)
        self._tokens.put(image.digest, tokens)
        self._processed.put(image.digest, processed)
        return processed

    def tokens(self, image: EncodedImage) -> ImageTokens:
        """Return the tokens that stand for an image. Raise DataError if the processor rejects it."""
        return self._tokens.get(image.digest) or self.process(image).tokens

    def escape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Write placeholders in a message's text as `< image>`, so that they are text. A model may write them."""

        def escape(text: str) -> str:
            for token in self._reserved:
                text = text.replace(token, f"{token[0]} {token[1:]}")
            return text

        content = message.get("content")
        if isinstance(content, str):
            content = escape(content)
        elif isinstance(content, list):
            content = [{**part, "text": escape(part["text"])} if "text" in part else part for part in content]
        return {**message, "content": content}

    def expand(self, text: str, images: Sequence[EncodedImage]) -> str:
        """Replace the placeholder of each image by the tokens that it fills, in order.

        Raise DataError unless the text has one placeholder per image.
        """
        placeholder = re.escape(self.placeholder)
        if (n_found := len(re.findall(placeholder, text))) != len(images):
            raise DataError(
                f"the conversation has {len(images)} images, but its text has {n_found} placeholders "
                f"{self.placeholder!r}; use a chat template that writes one for each image"
            )
        texts = iter(images)
        return re.sub(placeholder, lambda _: self.tokens(next(texts)).text, text)

    def collapse(self, token_ids: Sequence[int], spans: Spans) -> list[int]:
        """Undo `expand` for tokens: replace the tokens of each image by the template's placeholder.

        A token beside an image may also contain text of the conversation. Gemma 3 puts two newlines before an image, so
        "user\\n" and an image share the token "\\n\\n\\n". Collapsed, the first newline remains.
        """
        collapsed = list(token_ids)
        placeholder = self._encode(self.placeholder)
        for span in reversed(spans):  # the positions of earlier images stay valid
            own = self.tokens(span.image).token_ids
            start = span.start - own.index(self.token_id)
            end = start + len(own)
            before = self._cut(collapsed[start], own[0], str.removesuffix)
            after = self._cut(collapsed[end - 1], own[-1], str.removeprefix)
            collapsed[start:end] = before + placeholder + after
        return collapsed

    def _encode(self, text: str) -> list[int]:
        return self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _cut(self, token_id: int, own_id: int, remove: Callable[[str, str], str]) -> list[int]:
        """Return the tokens that remain of a token's text without the text of an image's own token."""
        if token_id == own_id:
            return []
        text, own = self._processor.tokenizer.batch_decode([[token_id], [own_id]])
        return self._encode(remove(text, own))

    def find_spans(self, token_ids: Sequence[int], images: Sequence[EncodedImage]) -> list[ImageSpan]:
        """Return where the images are in the tokens of an expanded text: from the first to the last placeholder."""
        positions = [position for position, token in enumerate(token_ids) if token == self.token_id]
        spans, n_before = [], 0
        for image in images:
            n_tokens = self.tokens(image).n_tokens
            filled = positions[n_before : n_before + n_tokens]
            spans.append(ImageSpan(filled[0], filled[-1] + 1, image))
            n_before += n_tokens
        assert n_before == len(positions), f"{len(positions)} placeholder tokens for {n_before} features"
        return spans


@lru_cache(maxsize=8)
def is_vision_model(path: str) -> bool:
    """Return True if the model at `path` reads images. Its image processor, which may need packages, is not loaded."""
    try:
        return has_vision(AutoConfig.from_pretrained(path))
    except (OSError, ValueError):  # loading the model reports it
        return False


@lru_cache(maxsize=8)
def load_image_processor(path: str) -> ImageProcessor | None:
    """Return the image processor of the model at `path`, or None for a text model. It is shared within a process.

    Raises:
        ConfigError: the processor of a vision-language model cannot be loaded, e.g. because a package is missing.
    """
    if not is_vision_model(path):
        return None
    try:
        token_id = int(AutoConfig.from_pretrained(path).image_token_id)
        return ImageProcessor(AutoProcessor.from_pretrained(path), token_id)
    except Exception as error:
        raise ConfigError(
            f"cannot load the image processor of {path}: {error}; a vision-language model needs its "
            "preprocessor_config.json, and the packages pillow and torchvision"
        ) from error


def find_text_model(path: str) -> str | None:
    """Return the path if the model there reads only text ("this model" if it is empty), or None if it reads images."""
    return None if is_vision_model(path) else path or "this model"


PROBED_SIZES = ((64, 48), (1600, 1200))
"""Sizes of images whose tokens are compared. Limits of pixels differ between settings of the same processor."""


def check_same_images(path: str, name: str, policy_path: str) -> None:
    """Raise ConfigError if the model at `path` has other tokens for an image than the policy.

    `name` is the model's name in the error. If one of the models reads only text, there is nothing to compare.
    """
    policy, other = load_image_processor(policy_path), load_image_processor(path)
    if policy is None or other is None or policy is other:
        return
    for width, height in PROBED_SIZES:
        image = read_image(np.zeros((height, width, 3), np.uint8))
        ours, theirs = policy.tokens(image), other.tokens(image)
        if (ours.text, policy.token_id) != (theirs.text, other.token_id):
            raise ConfigError(
                f"{name} reads an image of {width} x {height} pixels as {theirs.n_tokens} tokens "
                f"{other.placeholder}, but the policy reads it as {ours.n_tokens} tokens {policy.placeholder}; use a "
                "model of the policy's family with the policy's image processor"
            )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str) -> None:
    """Write a tokenizer into a folder, and the image processor of its model if it reads images."""
    if (images := load_image_processor(tokenizer.name_or_path)) is not None:
        images.save(folder)
    tokenizer.save_pretrained(folder)


def has_vision(config: Any) -> bool:
    """Return True for the configuration of a model that reads images."""
    return getattr(config, "vision_config", None) is not None
