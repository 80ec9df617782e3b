"""The general engine meets the contract of images, for each family of vision-language models."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from train_kit.engine_contract import ImageContract
from train_kit.engines import LIMITS, EngineKit, embedded_kit
from train_kit.models import load_on_cpu
from train_kit.vision_models import VISION_FAMILIES, family_param, picture, save_vision_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_gym.images import read_image
from skyrl_train.errors import EngineError
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.engine import create_engine
from skyrl_train.inference_engines.hf.general import GeneralEngine
from skyrl_train.media.spans import ImageSpan
from skyrl_train.models.loading import load_tokenizer


@pytest.fixture(params=[family_param(family) for family in VISION_FAMILIES])
async def image_kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineKit]:
    folder = save_vision_model(tmp_path, request.param)
    async with embedded_kit(GeneralEngine, load_on_cpu(folder), load_tokenizer(str(folder)), tolerance=2e-5) as kit:
        yield kit


class TestImages(ImageContract):
    """The contract of images."""


async def test_a_text_model_refuses_images(
    tiny_model: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    engine = create_engine(tiny_model, tiny_tokenizer, **LIMITS)
    span = ImageSpan(0, 1, read_image(picture(0)))
    with pytest.raises(EngineError, match="has images, but this engine reads only text; use a vision-language model"):
        await engine.generate([EngineRequest([5, 6], SamplingParams(1), 0, images=(span,))])
    await engine.close()
