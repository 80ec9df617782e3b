"""Images in vLLM. Here it runs Idefics 3. Other families need torchvision, which vLLM's CPU build lacks."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from train_kit.engine_contract import ImageContract
from train_kit.engines import EngineKit
from train_kit.models import load_on_cpu
from train_kit.vision_models import save_vision_model

from skyrl_train.inference_engines.base import EngineRequest, EngineResult
from skyrl_train.inference_engines.vllm.engine import VLLMEngine
from skyrl_train.models.loading import load_tokenizer

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1 << 26,
    "block_size": 32,
}


@pytest.fixture
async def image_kit(tmp_path: Path) -> AsyncIterator[EngineKit]:
    folder = save_vision_model(tmp_path, "idefics3", hidden_size=64, head_dim=32, num_attention_heads=2)
    tokenizer, engines = load_tokenizer(str(folder)), []

    def new(**options: Any) -> VLLMEngine:
        engines.append(VLLMEngine({"model": str(folder), **OPTIONS, **options}, tokenizer))
        return engines[-1]

    yield EngineKit(new, load_on_cpu(folder), tokenizer, 3e-5, cache_block_size=32)
    for engine in engines:
        await engine.close()


class TestImages(ImageContract):
    """The contract of images."""

    def check(self, kit: EngineKit, request: EngineRequest, result: EngineResult) -> None:
        """Compare up to the first sampled placeholder. vLLM reads it as it is, until the next turn."""
        placeholder = kit.model.config.image_token_id
        n_compared = [*result.token_ids, placeholder].index(placeholder) + 1
        expected = kit.trainer_logprobs(request, result)[:n_compared]
        assert (result.logprobs or [])[:n_compared] == pytest.approx(expected, abs=kit.tolerance)
