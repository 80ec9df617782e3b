"""Images in passes and samples. `make test-vision` runs all families."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_kit.engines import LIMITS
from train_kit.vision_models import as_batch, draw, family_param, picture, rows_with_images, save_vision_model
from tx_kit.backends import LORA, load, run_pass, sample, sample_request, target_logprobs, train

from skyrl_gym import images as images_module
from skyrl_gym.images import read_image
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.inference_engines.base import EngineRequest, SamplingParams
from skyrl_train.inference_engines.hf.engine import create_engine
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.logprobs import response_logprobs
from tx.tinker.backends.torch.backend import TorchBackend
from tx.tinker.backends.torch.images import read_with_images, to_spans
from tx.tinker.types import Datum, ImageInput, PlacedImage, SampleRequest, UserError
from tx.tinker.wire.chunks import Part, join_parts

FAMILIES = [family_param(f) for f in ("idefics3", "gemma3", "gemma4", "smolvlm", "qwen2_5_vl", "qwen3_vl")]
each_family = pytest.mark.parametrize("family", FAMILIES)
ADAPTER = replace(LORA, train_unembed=False)  # the embedded engine multiplies by a head without its hooks


PHOTO_CD = b"\xff\xd8\xff\x01".ljust(2048, b"\0") + b"PCD_" + bytes(2_000_000)
"""Begins like a JPEG file. Pillow reads it as a Photo CD, a format without a signature at the start."""


def load_vision(folder: Path, family: str = "idefics3") -> TorchBackend:
    """Load a backend with a vision-language model, and a model m with a random adapter."""
    backend = load("torch", save_vision_model(folder / family, family), sample_lanes=16, cache_gib=0.01)
    assert isinstance(backend, TorchBackend)
    backend.create_model("m", ADAPTER)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in backend._models["m"].weights.trained:
            tensor.normal_(std=0.2, generator=generator)
    return backend


def shown(seed: int, width: int = 48, height: int = 32, *, expected: int | None = None) -> ImageInput:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return ImageInput(file.getvalue(), "png", expected)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def placed(backend: TorchBackend, *parts: Part) -> tuple[list[int], Sequence[PlacedImage]]:
    tokens, images = join_parts(parts, backend.read_image, "prompt")
    return tokens.tolist(), images


def scored(tokens: Sequence[int], images: Sequence[PlacedImage]) -> Datum:
    return Datum(text(*tokens[:-1]), {"target_tokens": text(*tokens[1:])}, images)


@each_family
def test_gradients_and_logprobs_are_those_of_the_trainer(family: str, tmp_path: Path) -> None:
    backend = load_vision(tmp_path, family)
    rows = rows_with_images(ChatEncoder(load_tokenizer(str(backend.base_model.folder))))
    batch = as_batch(rows)
    data = []
    for row in rows:
        weights = np.array([*[0] * (row.n_prompt - 1), *row.loss_mask], np.float32)
        datum = scored(row.token_ids, [PlacedImage(span.start, span.end, span.image) for span in row.images])
        data.append(replace(datum, inputs={**datum.inputs, "weights": weights}))
        for span in row.images:  # the server makes the tokens that the client has replaced
            file = io.BytesIO()
            span.image.open().save(file, "PNG")
            tokens, _ = backend.read_image(ImageInput(file.getvalue(), "png", span.end - span.start))
            assert tokens == row.token_ids[span.start : span.end]
    result = run_pass(backend, "m", data)
    trained = backend._models["m"].weights
    with trained.applied():
        tensors = (batch.sequences, batch.attention_mask, batch.loss_mask)
        expected = response_logprobs(trained.model, *tensors, 1.0, images=batch.images).logprobs
        gradients = torch.autograd.grad(-expected.sum(), trained.trained)
    for row, datum in enumerate(data):
        ours = result.logprobs[row][datum.inputs["weights"] > 0]
        np.testing.assert_allclose(ours, expected[row][batch.loss_mask[row] > 0].detach().numpy(), atol=1e-5)
    for ours, theirs in zip(backend._models["m"].gradients or (), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@each_family
async def test_samples_are_those_of_the_embedded_engine(family: str, tmp_path: Path) -> None:
    backend = load_vision(tmp_path, family)
    first, second = shown(0), shown(1, 64, 32)
    prompts = [
        placed(backend, text(5, 6), first, text(7, 8), second, text(9)),
        placed(backend, first, text(5), first, text(6)),  # the same image twice, and one at the start
        placed(backend, text(5, 6), second),  # at the end
        placed(backend, first),
        placed(backend, text(5, 6, 7)),
    ]
    greedy = [
        replace(sample_request(tokens, n=5, max_tokens=9, scores_prompt=True, temperature=0.0), images=images)
        for tokens, images in prompts
    ]
    frozen = backend.weights_of("m")
    together = sample(backend, *[(request, frozen) for request in greedy])
    for request, found in zip(greedy, together, strict=True):
        (alone,) = sample(backend, (request, frozen))
        assert alone.samples == found.samples
        assert len({(tuple(one.tokens), tuple(one.logprobs)) for one in found.samples}) == 1
    data = [scored([*p, *f.samples[0].tokens], images) for (p, images), f in zip(prompts, together, strict=True)]
    for (prompt, _), found, logprobs in zip(prompts, together, target_logprobs(backend, "m", data), strict=True):
        assert found.prompt_logprobs is not None
        ours = [*found.prompt_logprobs[1:], *found.samples[0].logprobs]
        assert len(ours) == len(prompt) - 1 + 9
        np.testing.assert_allclose(ours, logprobs, atol=1e-5)
    with frozen.applied():
        engine = create_engine(frozen.model, load_tokenizer(str(backend.base_model.folder)), **LIMITS)
        params = SamplingParams(9, temperature=0.0)
        requests = [EngineRequest(p, params, 0, images=tuple(to_spans(images))) for p, images in prompts]
        results = await engine.generate(requests)
        await engine.close()
    for result, found in zip(results, together, strict=True):
        assert result.token_ids == found.samples[0].tokens[: len(result.token_ids)]


def test_samples_of_a_prompt_that_ends_with_an_image_differ_by_seed(tmp_path: Path) -> None:
    backend = load_vision(tmp_path)
    tokens, images = placed(backend, text(5), shown(0))

    def samples(**fields: Any) -> list[Sequence[int]]:
        request: SampleRequest = replace(sample_request(tokens, **fields), images=images)
        (found,) = sample(backend, (request, backend.base_weights()))
        return [one.tokens for one in found.samples]

    many = samples(n=20, max_tokens=3)
    assert len({tuple(one) for one in many}) > 10
    assert [one[:1] for one in many] == samples(n=20, max_tokens=1)
    assert backend.counts()["free tokens of the cache"] == backend._sampler.max_length


def test_an_adapter_covers_the_language_model_and_is_restored(tmp_path: Path) -> None:
    backend = load_vision(tmp_path)
    backend.create_model("whole", LORA)
    adapter = backend._models["whole"].weights.adapter
    assert adapter is not None
    assert {path.rpartition(".layers.")[0] for path in adapter} == {"model.text_model", ""}
    tokens, images = placed(backend, text(5, 6), shown(0), text(7, 8))
    data = [scored(tokens, images), scored([5, 6, 7], [])]
    assert train(backend, "whole", data) > train(backend, "whole", data)
    before = target_logprobs(backend, "whole", data)
    (tmp_path / "saved").mkdir()
    backend.capture("whole", with_optimizer=True)(tmp_path / "saved")
    backend.load_model("again", tmp_path / "saved", with_optimizer=True)
    np.testing.assert_array_equal(np.concatenate(target_logprobs(backend, "again", data)), np.concatenate(before))
    assert '"model.text_model.layers.0.self_attn.q_proj"' in (tmp_path / "saved/adapter_config.json").read_text()
    assert not backend.base_model.can_train_all


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (shown(0, expected=7), "an image of 48 x 32 pixels has expected_tokens=7, but .* makes 4 tokens of it"),
        (replace(shown(0), content=shown(0).content[:-200]), "cannot be decoded"),
        (replace(shown(0), format="jpeg"), "format='jpeg', but its .* bytes are not a jpeg file"),
        (replace(shown(0), format="webp"), "format='webp'; use png or jpeg"),
        (ImageInput(PHOTO_CD, "jpeg", None), "cannot be decoded as JPEG; send a file that is not damaged"),
        (ImageInput(draw("white", (8193, 8193)), "png", 4), "8193 x 8193 pixels; scale it"),
    ],
    ids=["other length", "cut off", "other format", "unknown format", "Photo CD", "huge"],
)
def test_invalid_images(image: ImageInput, words: str, tmp_path: Path) -> None:
    backend = load_vision(tmp_path)
    with pytest.raises(UserError, match=f"prompt: .*{words}"):
        placed(backend, text(5), image)


def test_a_text_model_reads_no_images(shallow_model: Path) -> None:
    with pytest.raises(UserError, match=r"org/tiny reads only text; .* serve a vision-language model"):
        load("torch", shallow_model).read_image(shown(0))


def test_a_known_image_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_vision(tmp_path)
    n_decoded, decode = 0, images_module._decode

    def count(*arguments: Any) -> Any:
        nonlocal n_decoded
        n_decoded += 1
        return decode(*arguments)

    monkeypatch.setattr(images_module, "_decode", count)
    monkeypatch.setattr("skyrl_train.media.processing.CACHED_BYTES", 1)  # keeps only the last image
    first, second = shown(20), shown(21)
    tokens, images = placed(backend, *[first, second] * 50)
    assert n_decoded == 4  # each image is checked, then processed
    assert tokens[:8] * 50 == tokens
    assert images[0].image == images[2].image == read_image(first.content)
    with pytest.raises(UserError, match="has expected_tokens=5"):
        backend.read_image(replace(first, expected_tokens=5))


def test_the_memory_for_known_images_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tx.tinker.backends.torch.images.KNOWN_BYTES", 2000)
    backend = load_vision(tmp_path)
    placed(backend, *(shown(seed, 8, 8) for seed in range(10)))
    assert backend._images is not None
    assert len(backend._images._known) == 3
    assert backend._images._n_bytes == sum(known.n_bytes for known in backend._images._known.values()) <= 2000


@each_family
def test_text_after_images_is_read_in_chunks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_vision(tmp_path, family)
    tokens, images = placed(backend, text(5, 6), shown(0), text(7, 8), shown(1, 64, 32), text(*range(9, 29)))
    request = replace(sample_request(tokens, max_tokens=9, scores_prompt=True, temperature=0.0), images=images)
    frozen = backend.weights_of("m")
    (whole,) = sample(backend, (request, frozen))
    lengths: list[int] = []

    def read(*arguments: Any) -> Any:
        lengths.append(arguments[-1])
        return read_with_images(*arguments)

    monkeypatch.setattr("tx.tinker.backends.torch.sampler.read_with_images", read)
    monkeypatch.setattr("tx.tinker.backends.torch.sampler.PROMPT_CHUNK", 8)
    (chunked,) = sample(backend, (request, frozen))
    assert lengths == [images[-1].end]
    assert chunked.samples[0].tokens == whole.samples[0].tokens
    assert chunked.prompt_logprobs is not None
    (logprobs,) = target_logprobs(backend, "m", [scored([*tokens, *chunked.samples[0].tokens], images)])
    found = [*chunked.prompt_logprobs[1:], *chunked.samples[0].logprobs]
    np.testing.assert_allclose(found, logprobs, atol=1e-5)


@pytest.mark.parametrize("family", [family_param(f) for f in ("gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl")])
def test_images_that_touch_are_refused_if_the_model_reads_them_as_one(family: str, tmp_path: Path) -> None:
    backend = load_vision(tmp_path, family)
    tokens, images = placed(backend, text(5), shown(0), shown(1), text(6))
    with pytest.raises(UserError, match=r"two images touch at token \d+; send the text tokens around"):
        run_pass(backend, "m", [scored(tokens, images)])
    with pytest.raises(UserError, match="two images touch"):
        sample(backend, (replace(sample_request(tokens), images=images), backend.base_weights()))


def test_tokens_between_tiles_belong_to_an_image(tmp_path: Path) -> None:
    backend = load_vision(tmp_path)
    assert backend._images is not None
    processor = backend._images._processor
    settings = processor._processor.image_processor
    settings.do_image_splitting, settings.size = True, {"longest_edge": 64}
    tokens, images = placed(backend, text(5), shown(40, 64, 48), text(6))
    (span,) = to_spans(images)
    inside = tokens[span.start : span.end]
    assert {inside[0], inside[-1]} == {processor.token_id}
    assert 4 < inside.count(processor.token_id) < len(inside)
    (logprobs,) = target_logprobs(backend, "m", [scored(tokens, images)])
    request = replace(sample_request(tokens, max_tokens=1, scores_prompt=True), images=images)
    (found,) = sample(backend, (request, backend.weights_of("m")))
    assert found.prompt_logprobs is not None
    np.testing.assert_allclose(found.prompt_logprobs[1:], logprobs, atol=1e-5)
