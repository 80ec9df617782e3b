import copy
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear
from train_kit.merges import save_experts
from train_kit.models import CPU, OTHER_ARCHITECTURES, create_model, load_on_cpu, save_tiny_model
from train_kit.vision_models import save_vision_model
from transformers import PreTrainedModel, Qwen2Config

from skyrl_train.config.policy import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.deferred import DeferredWeights, deferring
from skyrl_train.models.lora import add_adapter, base_checksum, count_parameters, merged_names, trained_parameters
from skyrl_train.models.quantization import QuantizedLinear, measure_quantized, quantize_base, quantized_layers
from skyrl_train.types.specs import LoraSpec

KEY = "trainer.policy.model.lora"
TOKENS = torch.arange(3, 23).view(2, 10)
LEVELS = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
LEVELS += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)
"""The values in appendix E of the paper."""


def quantized(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with matrices in 4 bits."""
    model = copy.deepcopy(model)
    quantize_base(model, KEY, CPU, DeferredWeights())
    return model


def test_each_weight_becomes_the_nearest_level_of_its_block() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0  # a block without a scale
    weight[5] *= 1000  # outliers must not cost other scales their precision
    blocks = weight.view(-1, 64)
    dequantized = QuantizedLinear(weight, None, 0).weight.reshape(-1, 64)
    for block, found in zip(blocks, dequantized, strict=True):
        scale = block.abs().max().item()
        levels = torch.tensor(LEVELS) * scale
        nearest = levels[(block[:, None] - levels).abs().argmin(1)]
        # Scales are rounded, so a weight halfway between two levels may get the other one.
        is_near = (found - nearest).abs() <= 0.02 * scale
        assert is_near.float().mean() > 0.9
        assert found.abs().max().item() == pytest.approx(scale, rel=0.02)


def test_an_adapter_is_added_without_dequantizing_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized(load_on_cpu(save_tiny_model(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedLinear, "dequantize", lambda *_: pytest.fail("a matrix was dequantized"))
        add_adapter(model, LoraSpec(LoraConfig(rank=4), KEY, str(tmp_path), seed=1))
    assert next(iter(quantized_layers(model).values())).weight.any()


def test_gradients_equal_those_through_the_dequantized_matrices(tmp_path: Path) -> None:
    biased = create_model(Qwen2Config(**OTHER_ARCHITECTURES["llama"].to_dict() | {"model_type": "qwen2"}))
    biased.save_pretrained(tmp_path)
    model, gradients = quantized(load_on_cpu(tmp_path)), []
    plain = load_on_cpu(tmp_path)
    plain.load_state_dict({name: tensor.detach() for name, tensor in merged_names(model)}, strict=False)
    for each in (model, plain):
        add_adapter(each, LoraSpec(LoraConfig(rank=4, alpha=8), KEY, str(tmp_path), seed=1))
        generator = torch.Generator().manual_seed(2)
        for name, parameter in trained_parameters(each).items():
            if ".lora_B." in name:
                parameter.data.normal_(std=0.2, generator=generator)
        logprobs = each(input_ids=TOKENS, use_cache=False).logits.log_softmax(-1)
        logprobs[..., 5].sum().backward()
        gradients.append({name: p.grad for name, p in trained_parameters(each).items() if p.grad is not None})
    assert len(gradients[0]) == 2 * 14
    assert max(gradient.abs().max() for gradient in gradients[1].values()) > 0.1
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-6, atol=1e-6)


def test_a_matrix_computes_in_the_dtype_of_autocast() -> None:
    torch.manual_seed(1)
    layer = QuantizedLinear(torch.randn(64, 32), torch.nn.Parameter(torch.randn(64), requires_grad=False), 0)
    x = torch.randn(3, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), output)
    assert torch.equal(output, linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
    output.sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, -1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["text", "experts", "images"])
def test_what_is_quantized_is_measured_without_loading_weights(kind: str, tmp_path: Path) -> None:
    create = {
        "text": save_tiny_model,
        "experts": save_experts,
        "images": lambda path: save_vision_model(path, "gemma3"),
    }
    path = create[kind](tmp_path / kind)
    with deferring() as weights:
        model = load_on_cpu(path)
    assert (weights.source is None) == (kind != "text"), "transformers converts the tensors of the other two"
    quantize_base(model, KEY, CPU, weights)
    layers = quantized_layers(model)
    size = measure_quantized(str(path))
    assert size.n_bytes == sum(buffer.nbytes for layer in layers.values() for buffer in layer.buffers())
    assert size.n_parameters == sum(layer.weight.numel() for layer in layers.values())
    assert count_parameters(model)[1] == count_parameters(load_on_cpu(path))[1]
    expected = {"text": 7 * 2, "experts": 4 * 2, "images": 7 * 3}
    assert len(layers) == expected[kind]
    assert not any("vision" in name or "head" in name for name in layers)


def test_weights_that_are_read_one_by_one_equal_those_of_a_loaded_model(
    tiny_model: PreTrainedModel, tiny_model_path: Path
) -> None:
    with deferring() as weights:
        model = load_on_cpu(tiny_model_path)
    quantize_base(model, KEY, CPU, weights)
    whole = quantized(tiny_model)
    assert base_checksum(model, torch.Tensor.detach) == base_checksum(whole, torch.Tensor.detach)
    assert [name for name, _ in merged_names(model)] == [name for name, _ in tiny_model.named_parameters()]
    for (name, tensor), (_, expected) in zip(merged_names(model), merged_names(whole), strict=True):
        assert torch.equal(tensor, expected), name
    logits = [each(input_ids=TOKENS, use_cache=False).logits for each in (model, whole, tiny_model)]
    assert torch.equal(logits[0], logits[1])
    gap = (logits[0] - logits[2]).norm() / logits[2].norm()
    assert 0.1 < gap < 0.4, "a model with random weights, the worst case"


def test_a_model_without_linear_modules_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quantize_base=nf4: a GPT2LMHeadModel has no linear modules.*set .*=none"):
        quantized(create_model(OTHER_ARCHITECTURES["gpt2"]))
