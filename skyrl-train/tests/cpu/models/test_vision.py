"""Vision-language models: exact scores, images encoded once, and what is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.models import load_on_cpu
from train_kit.vision_models import (
    as_batch,
    ask,
    conversation_row,
    each_family,
    picture,
    rows_with_images,
    save_vision_model,
)
from transformers import AutoProcessor, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.media.processing import load_image_processor
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.lora import add_adapter, trained_parameters
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.models.vision import find_encoder, freeze_vision, language_model_name
from skyrl_train.types import Segment
from skyrl_train.types.specs import LoraSpec

TURNS = (ask(picture(0), "What is it? ", picture(1, 64, 32)), ask("And this? ", picture(2)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saved: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in saved:
            saved[family] = save_vision_model(tmp_path_factory.mktemp(family), family)
        return saved[family]

    return folder


def chat_of(folder: Path) -> ChatEncoder:
    return ChatEncoder(load_tokenizer(str(folder)))


def own_logprobs(model: PreTrainedModel, folder: Path, row: Segment, messages: list[Any]) -> torch.Tensor:
    """Return the log-probs of the response, from the model's forward pass on what its processor makes of the images."""
    images = [part["image"].open() for message in messages for part in message["content"] if part["type"] == "image"]
    processor: Any = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[processor.image_token * len(images)], images=images, return_tensors="pt")
    input_ids = torch.tensor([row.token_ids])
    types = {
        name: (input_ids == model.config.image_token_id).long()
        for name in ("mm_token_type_ids", "token_type_ids")
        if name in inputs
    }
    media = {
        name: inputs[name]
        for name in ("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_position_ids")
        if name in inputs
    }
    logits = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **media, **types).logits
    logprobs = logits[0, row.n_prompt - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]


@each_family
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(family: str, folders: Any) -> None:
    folder = folders(family)
    model, row = load_on_cpu(folder), conversation_row(chat_of(folder), *TURNS)
    mask = torch.tensor(row.loss_mask)
    expected = own_logprobs(model, folder, row, [message for turn in TURNS for message in turn])
    (expected * mask).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in gradients)
    model.zero_grad()
    tokens = torch.tensor([row.token_ids])
    scores = response_logprobs(model, tokens, torch.ones_like(tokens), mask[None].float(), 1.0, images=[row.images])
    torch.testing.assert_close(scores.logprobs[0], expected * mask, rtol=0, atol=1e-5)
    scores.logprobs.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@each_family
def test_micro_batches_and_padding_change_nothing(family: str, folders: Any) -> None:
    folder = folders(family)
    module, batch = ScoringModule(load_on_cpu(folder)), as_batch(rows_with_images(chat_of(folder)))
    module.probe()
    together = module(batch)
    for i in range(len(batch)):
        alone = module(batch.select([i]))
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[i], rtol=0, atol=1e-5)


@each_family
def test_a_sampled_placeholder_is_an_ordinary_token(family: str, folders: Any) -> None:
    """A model may sample the placeholder of an image. No image belongs there."""
    folder = folders(family)
    model, chat = load_on_cpu(folder), chat_of(folder)
    placeholder = model.config.image_token_id
    reply = (5, placeholder, 7)
    rows = [conversation_row(chat, *TURNS, reply=reply), conversation_row(chat, ask("Only text."), reply=reply)]
    batch, module = as_batch(rows), ScoringModule(model)
    together = module(batch).logprobs
    assert (together != 0).sum(dim=1).tolist() == [6, 3]
    module.probe()
    assert module.shares_prefixes == (family != "qwen3_5"), "then the row of text is computed as a tree of prefixes"
    torch.testing.assert_close(module(batch.select([1])).logprobs[0], together[1], rtol=0, atol=1e-5)


def test_equal_images_are_encoded_once(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("idefics3")
    model, batch = load_on_cpu(folder), as_batch(rows_with_images(chat_of(folder)))
    encode, sizes = model.base_model.get_image_features, []

    def counting(**inputs: Any) -> Any:
        sizes.append(len(inputs["pixel_values"]))
        return encode(**inputs)

    monkeypatch.setattr(model.base_model, "get_image_features", counting)
    ScoringModule(model)(batch)
    assert sum(sizes) == 3, "three different images are shown four times"


@each_family
def test_the_image_encoder_is_frozen_or_trained(family: str, folders: Any) -> None:
    folder = folders(family)
    batch = as_batch(rows_with_images(chat_of(folder)))
    trained = {}
    for is_frozen in (True, False):
        model = load_on_cpu(folder)
        if is_frozen:
            freeze_vision(model)
        ScoringModule(model)(batch).logprobs.sum().backward()
        trained[is_frozen] = {name for name, p in model.named_parameters() if p.grad is not None}
    language = (language_model_name(model), "lm_head")
    assert trained[True] == {name for name in trained[False] if name.startswith(language)}
    assert trained[True] < trained[False]


@pytest.mark.parametrize("trains_vision", [False, True])
def test_an_adapter_has_the_image_encoder_only_on_request(folders: Any, trains_vision: bool) -> None:
    from skyrl_train.config.policy import LoraConfig

    model = load_on_cpu(folders("gemma3"))
    add_adapter(model, LoraSpec(LoraConfig(rank=2, exclude_modules=["q_proj"]), "lora", "base", 0, trains_vision))
    names = list(trained_parameters(model))
    assert names
    assert any("vision_tower" in name for name in names) == trains_vision
    assert not any("q_proj" in name for name in names)


def test_an_engine_forgets_features_after_an_update(folders: Any) -> None:
    model = load_on_cpu(folders("idefics3"))
    encoder, processor = find_encoder(model), load_image_processor(str(folders("idefics3")))
    assert encoder is not None
    assert processor is not None
    image = TURNS[0][0]["content"][0]["image"]
    token_ids = torch.full((1, processor.process(image).n_tokens), processor.token_id)
    spans = [processor.find_spans(token_ids[0].tolist(), [image])]

    def features() -> torch.Tensor:
        with torch.no_grad():
            output = encoder.arguments(token_ids, spans, caches=True)["mm_encoder_outputs"]["image"]
        return output.pooler_output.clone()

    before = features()
    with torch.no_grad():
        for parameter in model.base_model.connector.parameters():
            parameter.mul_(2)
    assert torch.equal(features(), before), "cached"
    encoder.forget()
    assert not torch.allclose(features(), before)


def test_a_model_with_images_is_no_critic(folders: Any) -> None:
    with pytest.raises(ConfigError, match=r"a gemma3 reads images, and cannot be a critic"):
        load_model(str(folders("gemma3")), "critic", dtype=torch.float32, device=torch.device("cpu"))
