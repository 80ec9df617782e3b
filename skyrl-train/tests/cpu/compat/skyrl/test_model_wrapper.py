"""The model under SkyRL's name: its constructor, and log-probs against those of all positions."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.compat.skyrl.model_wrapper import HFModelWrapper
from skyrl_train.errors import ConfigError

N_ACTIONS = 4


SEQUENCES = torch.randint(3, 400, (2, 9), generator=torch.Generator().manual_seed(0))
ATTENTION_MASK = torch.tensor([[1] * 9, [1] * 7 + [0] * 2])  # the last two tokens of the second row are padding


def test_a_path_and_a_model_have_the_log_probs_of_the_last_tokens(
    tiny_model_path: Path, tiny_model: PreTrainedModel
) -> None:
    with torch.no_grad():
        distribution = (tiny_model(SEQUENCES).logits[:, -N_ACTIONS - 1 : -1] / 0.5).log_softmax(dim=-1)
        expected = distribution.gather(-1, SEQUENCES[:, -N_ACTIONS:, None])[..., 0] * ATTENTION_MASK[:, -N_ACTIONS:]
        entropy = -(distribution.exp() * distribution).sum(dim=-1) * ATTENTION_MASK[:, -N_ACTIONS:]
    assert HFModelWrapper(str(tiny_model_path)).model.dtype == torch.bfloat16
    for source in (str(tiny_model_path), tiny_model):
        wrapper = HFModelWrapper(source, bf16=False, temperature=0.5)
        assert wrapper.model.dtype == torch.float32
        logprobs, output = wrapper(SEQUENCES, N_ACTIONS, ATTENTION_MASK, return_output=True, compute_entropy=True)
        torch.testing.assert_close(logprobs, expected)
        torch.testing.assert_close(output["entropy"], entropy)
        assert torch.equal(wrapper(SEQUENCES, N_ACTIONS, ATTENTION_MASK, temperature=0.5), logprobs)
        assert output["entropy"].requires_grad
        (_, detached) = wrapper(
            *(SEQUENCES, N_ACTIONS), return_output=True, compute_entropy=True, entropy_requires_grad=False
        )
        assert not detached["entropy"].requires_grad


def test_an_adapter_changes_nothing_at_first_and_is_trained_alone(tiny_model_path: Path) -> None:
    base = HFModelWrapper(str(tiny_model_path), bf16=False)
    wrapper = HFModelWrapper(
        *(str(tiny_model_path), False, False, 4, 8, 0.0, ["q_proj", "v_proj"]), exclude_modules="v_proj"
    )
    torch.testing.assert_close(wrapper(SEQUENCES, N_ACTIONS), base(SEQUENCES, N_ACTIONS))
    trained = [name for name, parameter in wrapper.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4  # A and B in two layers
    assert all(".q_proj.lora_" in name for name in trained)


def test_gradient_checkpointing_keeps_the_gradients(tiny_model: PreTrainedModel) -> None:
    gradients, n_calls = [], []
    for is_checkpointed in (False, True, False):
        wrapper = HFModelWrapper(copy.deepcopy(tiny_model))
        wrapper.gradient_checkpointing_enable()
        if not is_checkpointed:
            wrapper.gradient_checkpointing_disable()
        calls: list[int] = []
        wrapper.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        wrapper(SEQUENCES, N_ACTIONS).sum().backward()
        gradients.append(wrapper.model.model.layers[0].mlp.up_proj.weight.grad)
        n_calls.append(len(calls))
    assert n_calls == [1, 2, 1]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_what_would_be_wrong_is_refused(tiny_model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora_dropout=0\.1 would make log-probs random; set lora_dropout=0"):
        HFModelWrapper(tiny_model, lora_rank=2, lora_dropout=0.1)
    with pytest.raises(ConfigError, match="cannot load the model from pretrain_or_model="):
        HFModelWrapper(str(tmp_path))
