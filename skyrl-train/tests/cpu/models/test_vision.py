"""Vision-language models: exact scores, images encoded once, and what is trained."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit.models import CPU, load_on_cpu
from train_kit.vision_models import (
    as_batch,
    ask,
    conversation_row,
    each_family,
    picture,
    rows_with_images,
    save_vision_model,
)
from transformers import AutoProcessor, CLIPConfig, PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.generators.chat_template import ChatEncoder
from skyrl_train.media.processing import check_same_images, load_image_processor
from skyrl_train.models.loading import load_model, load_tokenizer
from skyrl_train.models.lora import add_adapter, trained_parameters
from skyrl_train.models.scoring_module import ScoringModule
from skyrl_train.models.vision import find_encoder, freeze_vision, language_model_name
from skyrl_train.models.vision_heads import register_head
from skyrl_train.types import Segment, TrainingBatch, ValueScores
from skyrl_train.types.specs import LoraSpec, Role

TURNS = (ask(picture(0), "What is it? ", picture(1, 64, 32)), ask("And this? ", picture(2)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saved: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in saved:
            saved[family] = save_vision_model(tmp_path_factory.mktemp(family), family)
        return saved[family]

    return folder


each_role = pytest.mark.parametrize("role", ["policy", "critic"])


def scored(module: ScoringModule, batch: TrainingBatch) -> torch.Tensor:
    """Return log-probs or values (B, R)."""
    scores = module(batch)
    return scores.values if isinstance(scores, ValueScores) else scores.logprobs


def chat_of(folder: Path) -> ChatEncoder:
    return ChatEncoder(load_tokenizer(str(folder)))


def load(folder: Path, role: Role) -> PreTrainedModel:
    """Load a model in a role. A critic gets a random head."""
    model = load_model(str(folder), role, dtype=torch.float32, device=CPU)
    if role == "critic":
        torch.manual_seed(0)
        torch.nn.init.normal_(model.score.weight, std=0.2)
    return model


def own_scores(model: PreTrainedModel, folder: Path, row: Segment, messages: list[Any]) -> torch.Tensor:
    """Return the log-probs of the response, or the values before its tokens from a critic.

    They come from the model's forward pass on what its processor makes of the images.
    """
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
    logits = logits[0, row.n_prompt - 1 : -1]
    if hasattr(model, "score"):
        return logits[:, 0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(row.response_ids)[:, None])[:, 0]


@each_role
@each_family
def test_scores_and_gradients_are_those_of_the_models_own_forward_pass(family: str, role: Role, folders: Any) -> None:
    folder = folders(family)
    model, row = load(folder, role), conversation_row(chat_of(folder), *TURNS)
    mask = torch.tensor(row.loss_mask)
    expected = own_scores(model, folder, row, [message for turn in TURNS for message in turn])
    (expected * mask).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("vision" in name or "visual" in name for name in gradients)
    model.zero_grad()
    scores = scored(ScoringModule(model, is_critic=role == "critic"), as_batch([row]))
    torch.testing.assert_close(scores[0], expected * mask, rtol=0, atol=1e-5)
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@each_role
@each_family
def test_micro_batches_and_padding_change_nothing(family: str, role: Role, folders: Any) -> None:
    folder = folders(family)
    batch = as_batch(rows_with_images(chat_of(folder)))
    module = ScoringModule(load(folder, role), is_critic=role == "critic")
    module.probe()
    together = scored(module, batch)
    for i in range(len(batch)):
        torch.testing.assert_close(scored(module, batch.select([i]))[0], together[i], rtol=0, atol=1e-5)


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


@each_role
@each_family
def test_the_image_encoder_is_frozen_or_trained(family: str, role: Role, folders: Any) -> None:
    folder = folders(family)
    batch = as_batch(rows_with_images(chat_of(folder)))
    trained = {}
    for is_frozen in (True, False):
        model = load(folder, role)
        if is_frozen:
            freeze_vision(model)
        scored(ScoringModule(model, is_critic=role == "critic"), batch).sum().backward()
        trained[is_frozen] = {name for name, p in model.named_parameters() if p.grad is not None}
    language = (language_model_name(model), "lm_head", "score")
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
    token_ids = torch.full((1, processor.tokens(image).n_tokens), processor.token_id)
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


@each_family
def test_a_critic_starts_as_the_policy_and_is_saved_with_its_head(family: str, folders: Any, tmp_path: Path) -> None:
    """Tensors have the names of the family's files, and are the same in a critic and a policy."""
    critic, policy = (
        load_model(str(folders(family)), "critic", dtype=torch.float32, device=CPU),
        load_on_cpu(folders(family)),
    )
    assert not critic.score.weight.any()
    for name, tensor in policy.base_model.state_dict().items():
        assert torch.equal(tensor, critic.base_model.state_dict()[name]), name
    torch.nn.init.normal_(critic.score.weight)
    critic.save_pretrained(tmp_path)
    saved, files = (load_file(folder / "model.safetensors") for folder in (tmp_path, folders(family)))
    assert saved.keys() - {"score.weight", "score.bias"} <= files.keys()
    loaded = load_model(str(tmp_path), "critic", dtype=torch.float32, device=CPU).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in critic.state_dict().items())


def test_other_image_tokens_than_the_policys_are_refused(folders: Any, tmp_path: Path) -> None:
    policy, other = folders("idefics3"), save_vision_model(tmp_path / "other", "idefics3", image_size=64)
    with pytest.raises(ConfigError, match=r"^a\.key=other reads an image of 64 x 48 pixels as 16 tokens <image>, but"):
        check_same_images(str(other), "a.key=other", str(policy))
    with pytest.raises(
        ConfigError, match=r"tokens <start_of_image>, but the policy reads it as 4 tokens <image>; use a"
    ):
        check_same_images(str(folders("gemma3")), "a.key=gemma", str(policy))
    check_same_images(str(shutil.copytree(policy, tmp_path / "same")), "a.key=same", str(policy))


def test_models_that_cannot_read_the_images_are_refused(folders: Any, tiny_model_path: Path) -> None:
    module = ScoringModule(load(tiny_model_path, "critic"), is_critic=True)
    batch = as_batch(rows_with_images(chat_of(folders("idefics3"))))
    module(batch.select([2]))
    with pytest.raises(ConfigError, match=r"rows have images, but .* reads only text; use a vision-language model"):
        module(batch)
    with pytest.raises(ConfigError, match="a clip reads images, and cannot be a critic here; use Qwen2"):
        register_head("critic", CLIPConfig())
