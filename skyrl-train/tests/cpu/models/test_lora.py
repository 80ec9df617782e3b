import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from train_kit import golden
from train_kit.models import CPU, SMALL, create_model, load_on_cpu
from transformers import PreTrainedModel, Qwen3MoeConfig

from skyrl_train.config.policy import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_model
from skyrl_train.models.lora import (
    adapter_disabled,
    adapter_layers,
    add_adapter,
    change_norm,
    count_trained,
    save_adapter,
    sync_tensors,
    trained_parameters,
)
from skyrl_train.models.low_rank import LEFT, RIGHT, MatrixChange, is_factor
from skyrl_train.types.specs import LoraSpec

KEY = "trainer.policy.model.lora"
TOKENS = torch.arange(3, 23).view(2, 10)


def spec(base: str = "base", **settings: Any) -> LoraSpec:
    return LoraSpec(LoraConfig(**settings), KEY, base, seed=1)


def adapted(model: PreTrainedModel, lora: LoraSpec) -> PreTrainedModel:
    """Return a copy of a model with an adapter."""
    model = copy.deepcopy(model)
    add_adapter(model, lora)
    return model


def randomized(model: PreTrainedModel, lora: LoraSpec) -> PreTrainedModel:
    """Return a copy of a model with an adapter that changes its logits."""
    model = adapted(model, lora)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def save(model: PreTrainedModel, folder: Path) -> Path:
    save_adapter(model, {name: p.detach() for name, p in trained_parameters(model).items()}, "base", folder)
    return folder


@pytest.mark.parametrize("init_method", ["kaiming", "gaussian"])
def test_a_new_adapter_changes_nothing(tiny_model: PreTrainedModel, init_method: str) -> None:
    model = adapted(tiny_model, spec(rank=4, init_method=init_method))
    assert torch.equal(logits(model), logits(tiny_model))
    assert change_norm(model, whole) == 0
    a = trained_parameters(model)["model.layers.0.mlp.up_proj.lora_A.default.weight"]
    assert a.std().item() == pytest.approx({"kaiming": (64 * 3) ** -0.5, "gaussian": 1 / 4}[init_method], rel=0.2)


def test_the_initial_values_depend_on_the_seed_alone(tiny_model: PreTrainedModel) -> None:
    adapters = []
    for lora in (spec(rank=4), spec(rank=4), LoraSpec(LoraConfig(rank=4), KEY, "base", seed=2)):
        torch.rand(1)
        before = torch.get_rng_state()
        model = adapted(tiny_model, lora)
        assert torch.equal(torch.get_rng_state(), before)
        adapters.append(torch.cat([p.detach().flatten() for p in trained_parameters(model).values()]))
    assert torch.equal(adapters[0], adapters[1])
    assert not torch.equal(adapters[0], adapters[2])


def test_the_model_without_its_adapter_is_bitwise_the_base(tiny_model: PreTrainedModel) -> None:
    model = randomized(tiny_model, spec(rank=4))
    assert (logits(model) - logits(tiny_model)).abs().max() > 0.1
    with adapter_disabled(model):
        assert torch.equal(logits(model), logits(tiny_model))
        assert all(p.requires_grad for name, p in model.named_parameters() if ".lora_" in name)
    assert (logits(model) - logits(tiny_model)).abs().max() > 0.1


def test_gradients_follow_from_those_of_the_merged_matrices(tiny_model: PreTrainedModel) -> None:
    """With W' = W + s·B·A: ∂/∂A = s·Bᵀ·∂/∂W' and ∂/∂B = s·∂/∂W'·Aᵀ."""
    model = randomized(tiny_model, spec(rank=4, alpha=8))
    plain = copy.deepcopy(tiny_model).requires_grad_(True)
    adapter = {name: p.detach() for name, p in trained_parameters(model).items()}
    matrices = [name.removesuffix(".lora_A.default.weight") for name in adapter if ".lora_A." in name]
    assert len(matrices) == 2 * 7
    factors = {path: [adapter[f"{path}.lora_{x}.default.weight"] for x in "AB"] for path in matrices}
    with torch.no_grad():
        for path, (a, b) in factors.items():
            plain.get_submodule(path).weight += 2 * b @ a
    for each in (model, plain):
        each(input_ids=TOKENS, use_cache=False).logits.log_softmax(dim=-1)[..., 5].sum().backward()
    for path, (a, b) in factors.items():
        gradient = plain.get_submodule(path).weight.grad
        expected = {"A": 2 * b.T @ gradient, "B": 2 * gradient @ a.T}
        for name, values in expected.items():
            actual = model.get_parameter(f"{path}.lora_{name}.default.weight").grad
            torch.testing.assert_close(actual, values, rtol=1e-4, atol=1e-4)
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora_" not in name)


def test_merged_tensors_have_the_logits_of_the_adapter_on_the_base(other_model: PreTrainedModel) -> None:
    model = randomized(other_model, spec(rank=3, alpha=6))
    merged = copy.deepcopy(other_model)
    names = {name for name, _ in merged.named_parameters()}
    tensors = dict(sync_tensors(model, "full", whole))
    assert tensors.keys() == names
    merged.load_state_dict(tensors, strict=False)
    assert (logits(model) - logits(other_model)).abs().max() > 1e-2
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_with_the_factors_is_bitwise_the_merged_model(
    other_model: PreTrainedModel, dtype: torch.dtype
) -> None:
    model = randomized(copy.deepcopy(other_model).to(dtype), spec(rank=3, alpha=5))
    merged = dict(sync_tensors(model, "full", whole))
    sent = dict(sync_tensors(model, "base_and_factors", whole))
    factors = [name for name in sent if is_factor(name)]
    assert list(sent) == [*factors, *merged], "a receiver merges one tensor after the other"
    assert factors == [name for name, _ in sync_tensors(model, "factors", whole)]
    n_changed = 0
    for name, tensor in merged.items():
        if name + LEFT in sent:
            assert not torch.equal(sent[name], tensor)
            sent[name] = MatrixChange(sent[name + LEFT], sent[name + RIGHT]).apply(sent[name])
            n_changed += 1
        assert torch.equal(sent[name], tensor)
        assert sent[name].dtype == dtype
    assert 2 * n_changed == len(factors) > 0


def test_the_norm_of_the_change_is_that_of_the_merged_weights(tiny_model: PreTrainedModel) -> None:
    model = randomized(tiny_model, spec(rank=4))
    before = dict(tiny_model.named_parameters())
    change = [(tensor - before[name]).norm() for name, tensor in sync_tensors(model, "full", whole)]
    assert change_norm(model, whole) == pytest.approx(torch.stack(change).norm().item(), rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"target_modules": ["q_proj", "lm_head"], "alpha": 3},
        {"target_modules": r".*layers\.1\..*_proj", "exclude_modules": ["up_proj"]},
    ],
)
def test_a_saved_adapter_has_the_same_logits_in_peft_and_here(
    tiny_model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    model = randomized(tiny_model, spec(rank=4, **settings))
    folder = save(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_model), str(folder))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)  # peft adds in two steps
    ours = adapted(tiny_model, spec(lora_path=str(folder)))
    assert torch.equal(logits(ours), logits(model))
    assert trained_parameters(ours).keys() == trained_parameters(model).keys()
    assert "continues on" not in caplog.text
    adapted(tiny_model, spec("other", lora_path=str(folder)))
    assert f"{folder} was trained on base and continues on other" in caplog.text


def test_a_bfloat16_model_has_a_float32_adapter_and_value_head(tiny_model_path: Path) -> None:
    policy = load_on_cpu(tiny_model_path, dtype=torch.bfloat16)
    critic = load_model(str(tiny_model_path), "critic", dtype=torch.bfloat16, device=CPU)
    for model in (policy, critic):
        add_adapter(model, spec(rank=4))
        assert {p.dtype for p in trained_parameters(model).values()} == {torch.float32}
    assert critic.get_parameter("score.weight").dtype == torch.float32
    assert logits(policy).dtype == torch.bfloat16


def test_a_critic_trains_its_value_head_too(tiny_model_path: Path, tmp_path: Path) -> None:
    critic = load_model(str(tiny_model_path), "critic", dtype=torch.float32, device=CPU)
    model = randomized(critic, spec(rank=2))
    assert [name for name in trained_parameters(model) if ".lora_" not in name] == ["score.weight", "score.bias"]
    ours = adapted(critic, spec(lora_path=str(save(model, tmp_path))))
    assert torch.equal(logits(ours), logits(model))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(critic), str(tmp_path))
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-4, atol=1e-5)  # peft adds in two steps


def test_parameters_are_counted_without_loading_weights(tiny_model: PreTrainedModel, tiny_model_path: Path) -> None:
    model = randomized(tiny_model, spec(rank=5))
    expected = sum(p.numel() for p in trained_parameters(model).values())
    assert count_trained(str(tiny_model_path), spec(rank=5)) == expected
    with pytest.raises(ConfigError, match="no module qproj"):
        count_trained(str(tiny_model_path), spec(rank=5, target_modules=["qproj"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "w_proj"]}, "target_modules=.*no module w_proj.*down_proj, gate_proj"),
        ({"exclude_modules": ["heads"]}, r"exclude_modules=\['heads'\].*no module heads"),
        ({"target_modules": "q_proj"}, "target_modules=q_proj.*not found"),
        ({"target_modules": ["embed_tokens"]}, r"model\.embed_tokens is a Embedding, and only linear modules"),
    ],
)
def test_modules_that_cannot_have_an_adapter_are_named(
    tiny_model: PreTrainedModel, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}") as error:
        adapted(tiny_model, spec(rank=4, **settings))
    assert KEY in str(error.value)


def test_experts_get_no_adapter() -> None:
    model = create_model(Qwen3MoeConfig(**SMALL, num_experts=4, moe_intermediate_size=16))
    message = (
        r"experts.* of a mixture of experts is not a linear module.*"
        r"set .*target_modules=\[k_proj,o_proj,q_proj,v_proj\]"
    )
    with pytest.raises(ConfigError, match=message):
        adapted(model, spec(rank=4))
    add_adapter(model, spec(rank=4, target_modules=["k_proj", "o_proj", "q_proj", "v_proj"]))
    assert len(trained_parameters(model)) == 2 * 2 * 4


@pytest.mark.parametrize("other_model", ["llama"], indirect=True)
def test_a_head_that_is_tied_to_the_embeddings_gets_no_adapter(other_model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="lm_head shares its weight with the embeddings"):
        adapted(other_model, spec(rank=4, target_modules=["lm_head", "q_proj"]))


def test_an_adapter_that_does_not_fit_is_refused(
    tiny_model: PreTrainedModel, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """A case changes the description of an adapter of rank 4."""
    folder = save(randomized(tiny_model, spec(rank=4)), tmp_path)
    file = folder / "adapter_config.json"
    text, printed = file.read_text(), {}
    for case in golden.read("models/adapters"):
        file.write_text(json.dumps(json.loads(text) | json.loads(case)))
        error = golden.catch(ConfigError, lambda: adapted(tiny_model, spec(lora_path=str(folder))), folder)
        printed[case] = [error]
    golden.compare("models/adapters", printed, pytestconfig)
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"has rank 4 and alpha 16, but {KEY}.rank=8 and {KEY}.alpha=16"):
        adapted(tiny_model, spec(lora_path=str(folder), rank=8))


def test_a_damaged_adapter_is_refused(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    model = randomized(tiny_model, spec(rank=4))
    with torch.no_grad():
        next(iter(trained_parameters(model).values()))[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="NaN or infinite values in base_model"):
        adapted(tiny_model, spec(lora_path=str(save(model, tmp_path / "nan"))))
    (tmp_path / "nan/adapter_model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"has no adapter_model.safetensors that can be read"):
        adapted(tiny_model, spec(lora_path=str(tmp_path / "nan")))
    with pytest.raises(ConfigError, match=f"Did you mean '{tmp_path}/nan'"):
        adapted(tiny_model, spec(lora_path=str(tmp_path / "nam")))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_continued_adapter_has_the_dropout_of_the_run(
    tiny_model: PreTrainedModel, tmp_path: Path, dropout: float
) -> None:
    """The dropout with which the adapter was trained does not count."""
    folder = save(randomized(tiny_model, spec(rank=4, dropout=0.5)), tmp_path)
    assert json.loads((folder / "adapter_config.json").read_text())["lora_dropout"] == 0.5
    for lora in (spec(lora_path=str(folder), dropout=dropout), spec(rank=4, dropout=dropout)):
        layers = adapter_layers(adapted(tiny_model, lora)).values()
        assert {getattr(layer.lora_dropout["default"], "p", 0.0) for layer in layers} == {dropout}
