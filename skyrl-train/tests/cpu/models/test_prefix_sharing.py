from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.models import PREFIX_SHARING_ARCHITECTURES, create_model
from transformers import PreTrainedModel

from skyrl_train.models import prefix_sharing
from skyrl_train.models.last_layer import is_narrow, narrow_last_layer
from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.prefix_sharing import PrefixTree, find_sharing_fault


def make_model(name: str) -> PreTrainedModel:
    model = create_model(PREFIX_SHARING_ARCHITECTURES[name], attn_implementation="sdpa", dtype=torch.float32).eval()
    narrow_last_layer(model)
    return model


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sequences, attention mask and loss mask of rows whose tokens are trained from the second on."""
    length = max(map(len, rows))
    sequences = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return sequences, mask, mask[:, 1:].float()


def scores_and_gradients(
    model: PreTrainedModel, rows: list[list[int]], *, shares_prefixes: bool, n_trained: int | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return log-probs of all tokens, or of `n_trained` of them, and the gradients of a weighted sum of them."""
    model.zero_grad()
    sequences, attention_mask, loss_mask = padded(rows)
    if n_trained is not None:
        chosen = loss_mask.flatten().nonzero()[:, 0]
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:n_trained]]
        loss_mask = torch.zeros(loss_mask.numel()).index_fill_(0, chosen, 1.0).view_as(loss_mask)
    logprobs = response_logprobs(
        model, sequences, attention_mask, loss_mask, 1.0, shares_prefixes=shares_prefixes
    ).logprobs
    weights = torch.linspace(-1, 2, logprobs.numel()).view_as(logprobs)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(model: PreTrainedModel, rows: list[list[int]], n_trained: int | None = None) -> None:
    """Compare scores and gradients with and without sharing."""
    shared, shared_gradients = scores_and_gradients(model, rows, shares_prefixes=True, n_trained=n_trained)
    separate, gradients = scores_and_gradients(model, rows, shares_prefixes=False, n_trained=n_trained)
    torch.testing.assert_close(shared, separate, rtol=1e-4, atol=1e-5)
    for actual, expected in zip(shared_gradients, gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", PREFIX_SHARING_ARCHITECTURES)
def test_scores_and_gradients_are_those_of_separate_rows(name: str) -> None:
    model = make_model(name)
    assert find_sharing_fault(model) is None
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, n).tolist() for n in (40, 7, 150)]
    rows = [prompt + rng.integers(0, 61, rng.integers(1, 60)).tolist() for prompt in prompts for _ in range(4)]
    assert_equal(model, rows)
    for n_trained in (0, 1, 30):  # the last layer computes these only
        assert_equal(model, rows, n_trained)


@given(rows=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=8), min_size=1, max_size=8))
@settings(max_examples=30)
def test_any_rows(rows: list[list[int]]) -> None:
    """Rows may be equal, or begin with one another, as those of a step-wise trajectory do."""
    assert_equal(MODEL, rows)


MODEL = make_model("qwen3")


@pytest.mark.parametrize("span", [1, 3, 64])
def test_attention_does_not_depend_on_the_size_of_its_calls(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(prefix_sharing, "SPAN", span)
    assert_equal(make_model("mistral"), [[1] * 9 + [i, i, 3] for i in range(4)] + [[5, 6]])


def test_each_token_is_computed_once() -> None:
    tree = PrefixTree([np.array(row) for row in ([1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7])], torch.device("cpu"))
    assert sorted(tree.token_ids.tolist()) == [1, 2, 3, 4, 5, 6, 7]
    assert tree.token_ids[tree.index[1]].tolist() == [1, 2, 3, 5, 6]
    assert tree.position_ids[tree.index[1]].tolist() == [0, 1, 2, 3, 4]


def test_a_model_that_mixes_neighboring_tokens_computes_each_row() -> None:
    model = make_model("llama")
    norm = model.base_model.layers[0].input_layernorm
    norm.register_forward_hook(lambda module, inputs, output: output + output.roll(1, dims=1))
    assert "would change its hidden states" in (find_sharing_fault(model) or "")


def test_the_last_layer_computes_trained_tokens_only() -> None:
    model = make_model("qwen3")
    assert find_sharing_fault(model) is None
    n_computed = [0, 0]
    for layer, module in enumerate(model.base_model.layers):
        module.mlp.register_forward_hook(
            lambda _, inputs, __, layer=layer: n_computed.__setitem__(layer, inputs[0].shape[1])
        )
    rows = [[1, 2, 3, i, i + 1] for i in range(4, 12)]
    scores_and_gradients(model, rows, shares_prefixes=True, n_trained=5)
    assert n_computed[0] == 3 + 2 * 8
    assert 0 < n_computed[1] <= 5


def refuse(module: torch.nn.Module, argument: str) -> None:
    """Make a module raise TypeError for an argument."""

    def check(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if argument in kwargs:
            raise TypeError("unexpected keyword argument")

    module.register_forward_pre_hook(check, with_kwargs=True)


def test_a_model_that_refuses_the_tree_computes_each_row() -> None:
    model = make_model("llama")
    refuse(model.base_model, "prefix_tree")
    assert "unexpected keyword argument" in (find_sharing_fault(model) or "")


def test_a_layer_that_rejects_selected_tokens_computes_all() -> None:
    model = make_model("llama")
    refuse(model.base_model.layers[-1].self_attn, "keys_and_values")
    assert is_narrow(model)
    assert find_sharing_fault(model) is None
    assert not is_narrow(model)
    assert_equal(model, [[1, 2, 3, 4], [1, 2, 5, 6]], n_trained=2)


def test_a_lack_of_memory_is_no_fault_of_the_model() -> None:
    model = make_model("llama")

    def exhaust(module: torch.nn.Module, inputs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        find_sharing_fault(model)


def test_a_last_layer_without_attention_computes_all_tokens() -> None:
    class Identity(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states, None

    model = make_model("llama")
    model.model.layers[-1].self_attn = Identity()
    assert find_sharing_fault(model) is None
    assert not is_narrow(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("parameter", ["model.norm.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_model_whose_states_are_not_finite_shares_no_prefixes(parameter: str, value: float) -> None:
    model = make_model("qwen3")
    assert find_sharing_fault(model) is None
    with torch.no_grad():
        model.get_parameter(parameter).fill_(value)
    assert "would change its hidden states by nan" in str(find_sharing_fault(model))
