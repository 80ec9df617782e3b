import sys
from collections.abc import Iterator

import pytest
import torch
from train_kit.models import SMALL, create_model
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from skyrl_train.models.fused import ROTARY, fuse_operations

CONFIGS = {
    "qwen3": Qwen3Config(**SMALL),
    "llama": LlamaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL, attn_logit_softcapping=None),
}


@pytest.fixture(autouse=True)
def originals() -> Iterator[None]:
    """Restore the rotary embeddings of transformers."""
    modules = (modeling_llama, modeling_qwen3, modeling_gemma2)
    before = [getattr(module, ROTARY) for module in modules]
    for module, rotary in zip(modules, before, strict=True):
        setattr(module, ROTARY, getattr(rotary, "original", rotary))
    yield
    for module, rotary in zip(modules, before, strict=True):
        setattr(module, ROTARY, rotary)


def make_model(name: str = "qwen3") -> PreTrainedModel:
    """Create a model, every weight of which shows in the logits: norms begin with ones."""
    model = create_model(CONFIGS[name]).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def logits_and_gradients(model: PreTrainedModel) -> list[torch.Tensor]:
    ids = torch.arange(1, 15).view(2, 7)
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_the_model(name: str) -> None:
    expected, model = logits_and_gradients(make_model(name)), make_model(name)
    fuse_operations(model)
    for own, reference in zip(logits_and_gradients(model), expected, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4 * float(reference.abs().max()))


@pytest.mark.parametrize(("name", "n_fused"), [("qwen3", 9), ("llama", 5), ("gemma2", 0)])
def test_only_the_usual_formula_is_replaced(name: str, n_fused: int) -> None:
    model = make_model(name)
    fuse_operations(model)
    assert sum("forward" in vars(module) for module in model.modules()) == n_fused  # Gemma adds 1 to its weights
    rotary = getattr(sys.modules[type(model).__module__], ROTARY)
    fuse_operations(model)
    assert getattr(sys.modules[type(model).__module__], ROTARY) is rotary, "replaced twice"


def test_a_norm_with_another_signature_is_kept() -> None:
    class GatedRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(states, (32,), self.weight, self.eps) * gate

    for norm in (GatedRMSNorm(), torch.nn.RMSNorm(32)):  # torch's has no epsilon of its own
        model = make_model()
        model.model.norm = norm
        fuse_operations(model)
        assert "forward" not in vars(norm)
        assert "forward" in vars(model.model.layers[0].input_layernorm)


def test_models_without_weights_and_with_frozen_norms_are_fused() -> None:
    with torch.device("meta"):
        empty = Qwen3ForCausalLM(CONFIGS["qwen3"])
    model = make_model()
    for each in (empty, model):
        fuse_operations(each)
        assert "forward" in vars(each.model.norm)
    model.model.norm.weight.requires_grad_(False)
    logits_and_gradients(model)
    assert model.model.norm.weight.grad is None
    assert model.model.layers[0].input_layernorm.weight.grad is not None


def test_bfloat16_is_as_exact_and_keeps_no_float32_states() -> None:
    exact = logits_and_gradients(make_model())
    plain, fused = make_model().bfloat16(), make_model().bfloat16()
    fuse_operations(fused)
    errors = [
        sum(float((own.double() - reference).norm()) for own, reference in zip(values, exact, strict=True))
        for values in (logits_and_gradients(fused), logits_and_gradients(plain))
    ]
    assert 0 < errors[0] < 1.05 * errors[1]

    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fused.model(input_ids=torch.arange(1, 8)[None], use_cache=False)
    assert not [each.shape for each in kept if each.dtype == torch.float32 and each.shape[-1] == SMALL["hidden_size"]]
