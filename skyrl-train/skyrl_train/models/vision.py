"""Inputs of a vision-language model: text tokens, features of images, and positions.

Transformers' models take the features as `mm_encoder_outputs`, and put them where the tokens are placeholders. So an
image is encoded once for all samples of a group, turns of a conversation and rows of a micro-batch that show it.

Three details differ from text:

- A placeholder that no image fills, because the model sampled it, is read as token 0. Otherwise the model would look
  for its features.
- Gemma 3 attends within an image in both directions, and needs to know which tokens belong to images.
- Qwen's models rotate by three positions (M-RoPE). An image of 4 x 6 features takes 6 positions, not 24, so the text
  after it is closer: position = number of tokens - 18.
"""

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from skyrl_gym.images import EncodedImage
from skyrl_train.errors import ConfigError
from skyrl_train.media.processing import has_vision, load_image_processor
from skyrl_train.media.spans import TEXT_FOR_PLACEHOLDER, ImageSpan, Spans

CACHED_BYTES = 2**28
"""Memory for the features of images that an engine keeps between requests."""


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one image: for its n placeholder tokens, and for the first layers of Qwen3-VL."""

    embeddings: torch.Tensor  # (n, H)
    deep: tuple[torch.Tensor, ...] = ()  # (n, H) each

    @property
    def n_bytes(self) -> int:
        """Memory of the features."""
        return sum(tensor.nbytes for tensor in (self.embeddings, *self.deep))


class ImageEncoder:
    """The image encoder of a vision-language model."""

    def __init__(self, model: PreTrainedModel) -> None:
        processor = load_image_processor(model.name_or_path)
        assert processor is not None, f"{model.name_or_path} reads only text"
        self._model: Any = model
        self._processor = processor
        self._token_id = processor.token_id
        parameters = inspect.signature(type(model.base_model).forward).parameters
        if "mm_encoder_outputs" not in parameters:
            raise ConfigError(
                f"a {type(model).__name__} does not take `mm_encoder_outputs`, so images cannot be encoded once; use "
                "Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, Gemma 4, Idefics 3 or SmolVLM"
            )
        self.type_argument = next((n for n in ("mm_token_type_ids", "token_type_ids") if n in parameters), None)
        """Name of the argument that marks the tokens of images, if the model has one."""
        self._has_grids = "image_grid_thw" in parameters
        self._takes_tuple = self._has_grids or "image_position_ids" in parameters  # of features, else one tensor
        self._cache: OrderedDict[str, Features] = OrderedDict()  # by digest, most recently used last
        self._n_bytes = 0

    @property
    def is_frozen(self) -> bool:
        """True if the encoder is not trained, so that its features need no gradient."""
        text = {id(p) for p in _language_model(self._model).parameters()}
        return not any(p.requires_grad for p in self._model.base_model.parameters() if id(p) not in text)

    def forget(self) -> None:
        """Drop all features, e.g. after an update of the encoder."""
        self._cache.clear()
        self._n_bytes = 0

    def arguments(self, input_ids: torch.Tensor, images: Sequence[Spans], *, caches: bool = False) -> dict[str, Any]:
        """Return the arguments of the base model for tokens (b, n) and the images of each row.

        `caches` keeps the features for the next call. Use it only without gradients.
        """
        is_image = torch.zeros(input_ids.shape, dtype=torch.bool)
        for row, spans in enumerate(images):
            for span in spans:
                is_image[row, span.start : span.end] = True
        is_image = is_image.to(input_ids.device) & (input_ids == self._token_id)
        arguments: dict[str, Any] = {"input_ids": torch.where(is_image, input_ids, self.as_text(input_ids))}
        shown = [span.image for spans in images for span in spans]
        if shown:
            if self.type_argument is not None:
                arguments[self.type_argument] = is_image.long()
            arguments["mm_encoder_outputs"] = {"image": self._join(self._encode(shown, caches=caches))}
            if self._has_grids:
                arguments["image_grid_thw"] = self._grids(shown)
        return arguments

    def as_text(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the tokens that the model reads where no image is: a placeholder is `TEXT_FOR_PLACEHOLDER`."""
        return input_ids.masked_fill(input_ids == self._token_id, TEXT_FOR_PLACEHOLDER)

    def positions(self, token_ids: Sequence[int], spans: Spans) -> torch.Tensor | None:
        """Return the position of each token in each dimension (3, n), or None if positions count the tokens."""
        get_positions = getattr(self._model.base_model, "get_rope_index", None)
        if get_positions is None:
            return None
        input_ids = torch.tensor([list(token_ids)])
        is_image = torch.zeros(input_ids.shape, dtype=torch.long)
        for span in spans:
            is_image[0, span.start : span.end] = 1
        grids = self._grids([span.image for span in spans]).cpu() if spans else None
        positions, _ = get_positions(input_ids, mm_token_type_ids=is_image, image_grid_thw=grids)
        return positions[:, 0]

    def _grids(self, images: Sequence[EncodedImage]) -> torch.Tensor:
        """Return the grid of patches (time, height, width) of each image."""
        grids = [self._processor.process(image).inputs["image_grid_thw"] for image in images]
        return torch.cat(grids).to(self._model.device)

    def _encode(self, images: Sequence[EncodedImage], *, caches: bool) -> list[Features]:
        """Return the features of each image. Equal images are encoded once, and images of equal shape together."""
        features: dict[str, Features] = {}
        new: dict[tuple[Any, ...], dict[str, EncodedImage]] = {}  # by shape, then by digest
        for image in images:
            if caches and image.digest in self._cache:
                self._cache.move_to_end(image.digest)
                features[image.digest] = self._cache[image.digest]
            else:
                inputs = self._processor.process(image).inputs
                shape = tuple((name, tensor.shape) for name, tensor in inputs.items())
                new.setdefault(shape, {})[image.digest] = image
        for alike in new.values():
            for digest, encoded in zip(alike, self._encode_alike(list(alike.values())), strict=True):
                features[digest] = encoded
                if caches:
                    self._cache[digest] = encoded
                    self._n_bytes += encoded.n_bytes
        while self._n_bytes > CACHED_BYTES and self._cache:
            self._n_bytes -= self._cache.popitem(last=False)[1].n_bytes
        return [features[image.digest] for image in images]

    def _encode_alike(self, images: Sequence[EncodedImage]) -> list[Features]:
        """Encode images whose tensors have the same shapes."""
        processed = [self._processor.process(image) for image in images]
        inputs = {
            name: torch.cat([one.inputs[name] for one in processed]).to(self._model.device)
            for name in processed[0].inputs
        }
        with torch.no_grad() if torch.is_grad_enabled() and self.is_frozen else nullcontext():
            output = self._model.base_model.get_image_features(**inputs, return_dict=True)
        size = self._model.config.get_text_config().hidden_size

        def divide(features: Any) -> list[torch.Tensor]:
            """Return the features (n, H) of each image. Gemma 4 pads images, so equal shapes may differ in n."""
            if isinstance(features, tuple | list) and len(features) == len(images):
                return [part.reshape(-1, size) for part in features]
            return list(features.reshape(len(images), -1, size))

        deep = [divide(layer) for layer in getattr(output, "deepstack_features", None) or ()]
        embeddings = divide(output.pooler_output)
        return [Features(own, tuple(layer[i] for layer in deep)) for i, own in enumerate(embeddings)]

    def _join(self, features: Sequence[Features]) -> BaseModelOutputWithPooling:
        """Return the features of all images in the form that the model's encoder returns."""
        embeddings: Any = torch.cat([part.embeddings for part in features])
        n_per_tile = getattr(self._model.base_model, "image_seq_len", None)
        if n_per_tile is not None:  # Idefics 3 and SmolVLM read tiles of equally many features
            embeddings = embeddings.view(-1, n_per_tile, embeddings.shape[-1])
        elif self._takes_tuple:
            embeddings = (embeddings,)
        joined = BaseModelOutputWithPooling(pooler_output=embeddings)
        if features[0].deep:
            joined["deepstack_features"] = [
                (torch.cat(layers),) for layers in zip(*(f.deep for f in features), strict=True)
            ]
        return joined


def find_encoder(model: PreTrainedModel) -> ImageEncoder | None:
    """Return the image encoder of a model, or None for a text model. Each model has one."""
    if not has_vision(model.config):
        return None
    encoder: ImageEncoder | None = vars(model).get("_skyrl_images")
    if encoder is None:
        encoder = ImageEncoder(model)
        object.__setattr__(model, "_skyrl_images", encoder)
    return encoder


def freeze_vision(model: PreTrainedModel) -> None:
    """Exclude everything but the language model and its head from training."""
    head = getattr(model, "score", None) or model.get_output_embeddings()
    trained = {id(p) for part in (_language_model(model), head) for p in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def language_model_name(model: Any) -> str:
    """Return the path of the language model in a vision-language model, e.g. "model.language_model"."""
    part = next(name for name in ("language_model", "text_model") if hasattr(model.base_model, name))
    return f"{model.base_model_prefix}.{part}"


def _language_model(model: PreTrainedModel) -> torch.nn.Module:
    return model.get_submodule(language_model_name(model))


def shift(spans: Spans, n_read: int) -> list[ImageSpan]:
    """Return the images after the first `n_read` tokens, in positions of the tokens that follow."""
    return [span.shift(-n_read) for span in spans if span.start >= n_read]
