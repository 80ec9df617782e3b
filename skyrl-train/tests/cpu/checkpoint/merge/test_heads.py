"""Adapters and checkpoints of critics and reward models, merged with their heads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.merges import TOLERANCES, load_head, logits, save_base, save_experts, save_head_adapter
from train_kit.models import ROUTER_BIAS, SMALL, create_model
from train_kit.workers import SingleRankGroup, config
from transformers import AutoModelForCausalLM, DeepseekV3Config, PreTrainedTokenizerBase

from skyrl_train.algorithms.objectives import RewardObjective, ValueObjective
from skyrl_train.checkpoint.merge import average_models, merge_adapter, merge_checkpoint
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.loading import AUTO_CLASSES
from skyrl_train.types.specs import Role

pytestmark = pytest.mark.usefixtures("frozen_objects")  # a merge collects garbage

nightly = pytest.mark.nightly


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_a_checkpoint_is_merged_with_its_head_if_it_was_trained(
    tmp_path: Path, tiny_model_path: Path, role: Role
) -> None:
    model = load_head(tiny_model_path, role)
    objective = ValueObjective(0.2) if role == "critic" else RewardObjective()
    SingleRankGroup(role, model, config().trainer, objective).save(tmp_path / "step" / role)
    with pytest.raises(CheckpointError, match="Nothing was trained"):
        merge_checkpoint(tmp_path / "step", tmp_path / "merged", role=role)
    torch.nn.init.normal_(model.get_parameter("score.weight"))
    SingleRankGroup(role, model, config().trainer, objective).save(tmp_path / "next" / role)
    assert merge_checkpoint(tmp_path / "next", tmp_path / "merged", role=role).n_changed == 1
    merged = AUTO_CLASSES[role].from_pretrained(tmp_path / "merged")
    assert role == "critic" or (merged.config.num_labels, merged.config.pad_token_id) == (1, 0)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-4)  # rounding depends on alignment


@pytest.mark.parametrize(
    ("role", "has_head"),
    [
        ("critic", True),
        ("reward", False),
        pytest.param("critic", False, marks=nightly),
        pytest.param("reward", True, marks=nightly),
    ],
)
def test_an_adapter_is_merged_with_its_head(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tiny_model_path: Path, role: Role, has_head: bool
) -> None:
    base = tmp_path / "base"
    if has_head:  # as a base that was trained before
        model = AUTO_CLASSES[role].from_pretrained(tiny_model_path, num_labels=1)
        model.config.pad_token_id = tiny_tokenizer.pad_token_id
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16)
    model.save_pretrained(base)
    expected = logits(save_head_adapter(tmp_path, base, role, tiny_tokenizer))
    checkpoint, export = tmp_path / "of the checkpoint", tmp_path / "of the export"
    reports = [
        merge_checkpoint(tmp_path / "step", checkpoint, role=role, dtype="float32"),
        merge_adapter(str(tmp_path / "adapter"), export, dtype="float32"),
    ]
    for report in reports:
        assert report.logit_gap < 1e-5
        assert report.n_changed == (16 if role == "critic" else 15), "14 matrices, and the head with its bias"
        merged = AUTO_CLASSES[role].from_pretrained(report.folder)
        torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
        assert merged.config.num_labels == 1
        assert merged.config.architectures == [type(merged).__name__]
        assert role == "critic" or merged.config.pad_token_id == tiny_tokenizer.pad_token_id
        assert "lm_head.weight" not in load_file(report.folder / "model.safetensors")
        assert (report.folder / "tokenizer.json").is_file()
    rounded = merge_adapter(str(tmp_path / "adapter"), tmp_path / "rounded")
    assert rounded.logit_gap < TOLERANCES["float32" if has_head else "bfloat16"]
    with pytest.raises(CheckpointError, match=r"the average of .* is identical to"):
        average_models([str(checkpoint), str(export)], tmp_path / "mean")
    if has_head:
        assert average_models([str(export), str(base)], tmp_path / "mean").logit_gap < 1e-5


@pytest.mark.parametrize("role", [pytest.param("critic", marks=nightly), "reward"])
def test_an_adapter_is_merged_with_buffers(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, role: Role) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    settings = SMALL | {"num_key_value_heads": 4} | experts | heads
    model = create_model(DeepseekV3Config(**settings, n_group=1, topk_group=1))
    model.get_buffer(ROUTER_BIAS).copy_(torch.tensor([1.0, -1.0, 2.0, 0.5]))
    model.save_pretrained(tmp_path / "base")
    expected = logits(save_head_adapter(tmp_path, tmp_path / "base", role, tiny_tokenizer, target_modules=["o_proj"]))
    report = merge_checkpoint(tmp_path / "step", tmp_path / "merged", role=role)
    merged = AUTO_CLASSES[role].from_pretrained(report.folder)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("role", ["critic", pytest.param("reward", marks=nightly)])
def test_an_adapter_of_experts_is_merged(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, role: Role) -> None:
    base = save_experts(tmp_path / "base")
    expected = logits(save_head_adapter(tmp_path, base, role, tiny_tokenizer, target_modules=["q_proj", "v_proj"]))
    for report in (
        merge_checkpoint(tmp_path / "step", tmp_path / "of the checkpoint", role=role),
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "of the export"),
    ):
        torch.testing.assert_close(logits(AUTO_CLASSES[role].from_pretrained(report.folder)), expected)
        assert "lm_head.weight" not in load_file(report.folder / "model.safetensors")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model.layers.1.mlp.experts.2.up_proj.weight, which the adapter"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")


def test_an_adapter_that_does_not_describe_its_head_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Its kind of model has no head, or a reward model has no pad token."""
    save_head_adapter(tmp_path, save_base(tmp_path / "base"), "reward", tiny_tokenizer)
    file = tmp_path / "adapter/adapter_config.json"
    settings = file.read_text()
    file.write_text(json.dumps(json.loads(settings) | {"task_type": "CAUSAL_LM"}))
    with pytest.raises(ConfigError, match="task_type=CAUSAL_LM has none; set SEQ_CLS for a reward model"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
    file.write_text(settings)
    for tokenizer in (tmp_path / "adapter").glob("*token*"):
        tokenizer.unlink()
    with pytest.raises(ConfigError, match=r"neither the adapter .* nor its base has a tokenizer"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")
