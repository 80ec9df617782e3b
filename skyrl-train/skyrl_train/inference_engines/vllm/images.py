"""Images in requests to vLLM: its own processor makes the tensors, and our tokens say where they belong."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.processing import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from skyrl_gym.images import EncodedImage
from skyrl_train.inference_engines.vllm.wire import MAX_IMAGES
from skyrl_train.media.processing import load_image_processor
from skyrl_train.media.spans import ImageSpan, hide_placeholders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.config import VllmConfig

    from skyrl_train.inference_engines.sequence import ActiveSequence


class RequestImages:
    """Converts the images of requests for a vision-language model in vLLM."""

    def __init__(self, config: VllmConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        images = load_image_processor(tokenizer.name_or_path)
        assert images is not None, f"{tokenizer.name_or_path} reads only text"
        self._token_id = images.token_id
        self._placeholder = tokenizer(images.placeholder, add_special_tokens=False)["input_ids"]
        self._processor = MULTIMODAL_REGISTRY.create_processor(config.model_config, tokenizer=tokenizer)
        self._cache: OrderedDict[str, Any] = OrderedDict()  # by digest, most recently used last

    def tokens(self, sequence: ActiveSequence) -> list[int]:
        """Return the tokens of a sequence as the trainer reads them: a placeholder outside of images is other text."""
        return hide_placeholders(sequence.token_ids, sequence.request.images, self._token_id)

    def features(self, sequence: ActiveSequence) -> list[MultiModalFeatureSpec]:
        """Return the images of a request, in order, with their places in the prompt."""
        return [self._feature(span, sequence.token_ids) for span in sequence.request.images]

    def _feature(self, span: ImageSpan, token_ids: list[int]) -> MultiModalFeatureSpec:
        is_filled = torch.tensor(token_ids[span.start : span.end]) == self._token_id
        place = PlaceholderRange(span.start, span.end - span.start, None if is_filled.all() else is_filled)
        return MultiModalFeatureSpec(self._process(span.image), "image", span.image.digest, place, span.image.digest)

    def _process(self, image: EncodedImage) -> Any:
        if image.digest not in self._cache:
            items = self._processor.info.parse_mm_data({"image": [image.open()]})
            output = self._processor.apply(
                ProcessorInputs(list(self._placeholder), items), TimingContext(enabled=False)
            )
            (self._cache[image.digest],) = output["mm_kwargs"]["image"]
            while len(self._cache) > MAX_IMAGES:
                self._cache.popitem(last=False)
        self._cache.move_to_end(image.digest)
        return self._cache[image.digest]


def load_images(config: VllmConfig, tokenizer: PreTrainedTokenizerBase) -> RequestImages | None:
    """Return the conversion for a model that reads images, or None for a text model."""
    return RequestImages(config, tokenizer) if config.model_config.is_multimodal_model else None
