"""Images in vLLM. Here it runs Idefics 3. Other families need torchvision, which vLLM's CPU build lacks."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from train_kit.engine_contract import ImageContract
from train_kit.engines import EngineKit, assert_agrees
from train_kit.models import load_on_cpu
from train_kit.vision_models import ask, picture, picture_run, save_vision_model
from train_kit.vllm_server import OURS, Server
from transformers import PreTrainedTokenizerBase

from skyrl_train.entrypoints import main_base
from skyrl_train.errors import EngineError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineRequest, InferenceEngine, SamplingParams
from skyrl_train.inference_engines.vllm.engine import AsyncVLLMEngine, VLLMEngine
from skyrl_train.inference_engines.vllm.server import VLLMServerEngine
from skyrl_train.models.loading import load_tokenizer

pytestmark = pytest.mark.timeout(300)

OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1 << 26,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model."""
    return _save(tmp_path_factory.mktemp("idefics3"))


def _save(folder: Path, **options: Any) -> Path:
    return save_vision_model(folder, "idefics3", hidden_size=64, head_dim=32, num_attention_heads=2, **options)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server({"model": str(folder), **OPTIONS, **OURS}, VLLM_SERVER_DEV_MODE="1")
    yield server
    server.close()


@pytest.fixture(params=["this process", "other process", "server"])
async def image_kit(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[EngineKit]:
    tokenizer, options = load_tokenizer(str(folder)), {"model": str(folder), **OPTIONS}
    engine: InferenceEngine
    if request.param == "this process":
        engine = VLLMEngine(options, tokenizer)
    elif request.param == "other process":
        engine = AsyncVLLMEngine(options, tokenizer)
    else:
        engine = VLLMServerEngine(request.getfixturevalue("server").url, tokenizer)
    kit = EngineKit(lambda: engine, load_on_cpu(folder), tokenizer, 3e-5, cache_block_size=32, transport="auto")
    await kit.sync(engine, 0)  # the server has the weights of another test
    yield kit
    await engine.close()


class TestImages(ImageContract):
    """The contract of images."""


def _request(tokenizer: PreTrainedTokenizerBase, image: Image.Image) -> EngineRequest:
    chat, prompt = ChatEncoder(tokenizer), ask(image, "What is it?")
    ids = chat.prompt_ids(prompt)
    return EngineRequest(ids, SamplingParams(4, temperature=0.0), 0, images=tuple(chat.find_spans(ids, prompt)))


@pytest.mark.parametrize("image_kit", ["server"], indirect=True)
async def test_a_server_reads_the_pixels_of_the_trainer(image_kit: EngineKit) -> None:
    """A transparent pixel of a palette is white for us, and black for vLLM."""
    palette = picture(0).quantize(4)
    palette.info["transparency"] = palette.getpixel((0, 0))
    request = _request(image_kit.tokenizer, palette)
    (result,) = await image_kit.new().generate([request])
    assert_agrees(image_kit, request, result)


async def test_a_server_that_reads_other_tokens_is_refused(server: Server, tmp_path: Path) -> None:
    """Its image processor has other settings."""
    tokenizer = load_tokenizer(str(_save(tmp_path, image_size=64)))
    engine = VLLMServerEngine(server.url, tokenizer)
    with pytest.raises(EngineError, match="reads other tokens than ours for a prompt with images; start it with"):
        await engine.generate([_request(tokenizer, picture(0))])
    await engine.close()


def test_a_run_trains_on_images_with_a_server(tmp_path: Path, server: Server, folder: Path) -> None:
    """Its image encoder is trained, too, so the server must forget features."""
    settings = [
        "generator.backend=vllm",
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=['{server.url}']",
        "trainer.policy.model.freeze_vision=false",
    ]
    main_base.main(picture_run(tmp_path, *settings, model=folder))
    rows = [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4
