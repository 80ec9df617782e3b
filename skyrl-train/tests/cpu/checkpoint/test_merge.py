"""Merging: round trips, and failures that leave nothing behind."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from train_kit.batches import random_batch
from train_kit.models import ROUTER_BIAS, SMALL, save_biased_router
from train_kit.workers import SingleRankGroup, complete, config, make_worker
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV3Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from skyrl_train.algorithms.objectives import RewardObjective, ValueObjective
from skyrl_train.checkpoint import model_folder
from skyrl_train.checkpoint.lock import folder_lock
from skyrl_train.checkpoint.manifest import write_manifest
from skyrl_train.checkpoint.merge import adapter as adapter_merge
from skyrl_train.checkpoint.merge import average_models, merge_adapter, merge_checkpoint
from skyrl_train.entrypoints.cli import main
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.loading import AUTO_CLASSES, load_model, load_reward_model, load_value_model
from skyrl_train.types.specs import Role

TOKENS = torch.arange(3, 23).view(2, 10)
TYPES = {"float32": 1e-5, "bfloat16": 1e-1}


def new_model(
    folder: Path, *, seed: int = 0, is_tied: bool = False, dtype: str = "float32", hidden_size: int = 32
) -> Path:
    shape = {"hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "initializer_range": 0.3}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=is_tied))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def new_experts(folder: Path, *, seed: int = 0) -> Path:
    """Save a mixture of experts: files have the matrices of each expert, and the loaded model has one tensor of all."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in load_file(folder / "model.safetensors")
    return folder


def new_adapter(folder: Path, base: Path, *, rank: int = 4, scale: float = 0.2, **settings: Any) -> Path:
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(
            **{"r": rank, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
        ),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=scale)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=TOKENS, use_cache=False).logits.float()


def logits_in(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    is_tied=st.booleans(),
    dtype=st.sampled_from(sorted(TYPES)),
    rank=st.integers(1, 9),
    use_rslora=st.booleans(),
    targets=st.sampled_from(["all-linear", ["q_proj", "down_proj"], r".*layers\.1\.mlp\..*_proj"]),
    shard_bytes=st.sampled_from([5_000, 10**9]),
)
def test_a_merged_adapter_has_the_logits_of_the_adapter_on_its_base(
    tmp_path_factory: pytest.TempPathFactory,
    is_tied: bool,
    dtype: str,
    rank: int,
    use_rslora: bool,
    targets: str | list[str],
    shard_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    base = new_model(folder / "base", is_tied=is_tied, dtype=dtype)
    adapter = new_adapter(folder / "adapter", base, rank=rank, use_rslora=use_rslora, target_modules=targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_folder, "SHARD_BYTES", shard_bytes)
        report = merge_adapter(str(adapter), folder / "merged")
    expected = logits(peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)))
    assert (logits_in(folder / "merged") - expected).norm() < TYPES[dtype] * expected.norm()
    assert (logits_in(base) - expected).norm() > 10 * TYPES["float32"] * expected.norm()
    assert report.n_changed == sum("lora_A" in name for name in load_file(adapter / "adapter_model.safetensors"))
    assert report.n_tensors == len(load_file(base / "model.safetensors"))
    assert (folder / "merged/config.json").read_bytes() == (base / "config.json").read_bytes()
    assert (len(list((folder / "merged").glob("*.safetensors"))) == 1) == (shard_bytes > 5_000)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
@pytest.mark.parametrize("merged", ["float32", "bfloat16"])
def test_the_type_of_the_merged_weights_can_be_chosen(tmp_path: Path, saved: str, merged: Any) -> None:
    base = new_model(tmp_path / "base", dtype=saved)
    adapter = new_adapter(tmp_path / "adapter", base)
    report = merge_adapter(str(adapter), tmp_path / "merged", dtype=merged)
    assert report.logit_gap < TYPES[merged]
    tensors = load_file(tmp_path / "merged/model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{merged}"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == getattr(torch, merged)


def test_every_linear_architecture_can_be_merged(other_model: PreTrainedModel, tmp_path: Path) -> None:
    other_model.save_pretrained(tmp_path / "base")
    adapter = new_adapter(tmp_path / "adapter", tmp_path / "base")
    assert merge_adapter(str(adapter), tmp_path / "merged").logit_gap < 1e-5


@settings(max_examples=8)
@given(weights=st.lists(st.floats(0.1, 1), min_size=2, max_size=3), is_tied=st.booleans())
def test_an_average_has_the_mean_of_each_tensor(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], is_tied: bool
) -> None:
    folder = tmp_path_factory.mktemp("average")
    shares = [weight / sum(weights) for weight in weights]
    sources = [new_model(folder / str(i), seed=i, is_tied=is_tied) for i in range(len(shares))]
    report = average_models([str(source) for source in sources], folder / "mean", shares)
    tensors = [load_file(source / "model.safetensors") for source in sources]
    for name, mean in load_file(folder / "mean/model.safetensors").items():
        expected = sum(share * one[name].double() for share, one in zip(shares, tensors, strict=True))
        torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    assert report.n_changed == len([name for name in tensors[0] if "norm" not in name])  # norms start at 1
    assert report.logit_gap < 1e-5


def trained(
    folder: Path, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **section: Any
) -> SingleRankGroup:
    """Train a policy for two steps and save it as `folder/policy`."""
    worker = make_worker(policy, tokenizer=tokenizer, policy={"optimizer_config": {"lr": 1e-2}, **section})
    for seed in range(2):
        worker.update(random_batch(seed, n_tokens=60))
    worker.save(folder / "policy")
    return worker


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
def test_a_checkpoint_becomes_the_model_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, is_tied: bool, lora: dict[str, Any], saved: str
) -> None:
    base = new_model(tmp_path / "base", is_tied=is_tied, dtype=saved)
    model = load_model(str(base), dtype=torch.float32, device=torch.device("cpu"))
    trained(tmp_path / "step", model, tiny_tokenizer, model={"path": str(base), "lora": lora})
    report = merge_checkpoint(tmp_path / "step", tmp_path / "merged", dtype="float32")
    assert (logits_in(tmp_path / "merged") - logits_in(base)).abs().max() > 1e-2
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)
    assert report.n_tensors == len(list(load_file(base / "model.safetensors")))
    assert (tmp_path / "merged/tokenizer.json").exists()
    assert (tmp_path / "merged/generation_config.json").exists()
    assert (tmp_path / "merged/lora_adapter").exists() == bool(lora)


def test_files_may_hold_a_copy_of_a_tied_head(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    """Published models such as Qwen3-0.6B store the head beside the embeddings that it shares its weight with."""
    base = new_model(tmp_path / "base", is_tied=True)
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    model = load_model(str(base), dtype=torch.float32, device=torch.device("cpu"))
    trained(tmp_path / "step", model, tiny_tokenizer, model={"path": str(base), "lora": {"rank": 4}})
    merge_checkpoint(tmp_path / "step", tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)


def test_the_adapter_of_a_mixture_of_experts_is_merged_into_the_base_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    base, other = (new_experts(tmp_path / str(seed), seed=seed) for seed in range(2))
    model = load_model(str(base), dtype=torch.float32, device=torch.device("cpu"))
    lora = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
    trained(tmp_path / "step", model, tiny_tokenizer, model={"path": str(base), "lora": lora})
    merge_checkpoint(tmp_path / "step", tmp_path / "merged")
    torch.testing.assert_close(logits_in(tmp_path / "merged"), logits(model), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        merge_checkpoint(tmp_path / "step", tmp_path / "again", base=str(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [{}, {"rank": 4, "target_modules": ["q_proj", "v_proj"], "merge_on_export": True}])
def test_buffers_are_exported_and_merged(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, lora: dict[str, Any], dtype: str
) -> None:
    base = save_biased_router(tmp_path / "base")
    model = load_model(str(base), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    worker = trained(tmp_path / "step", model, tiny_tokenizer, model={"path": str(base), "lora": lora})
    complete(worker.group.export(tmp_path / "export"))
    assert merge_checkpoint(tmp_path / "step", tmp_path / "merged").logit_gap < TYPES[dtype]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("base", "export", "merged")]
    assert files[0].keys() == files[1].keys() == files[2].keys()
    for tensors in files:
        assert torch.equal(tensors[ROUTER_BIAS], model.get_buffer(ROUTER_BIAS))


def test_the_average_of_routers_with_a_bias(tmp_path: Path) -> None:
    sources = [save_biased_router(tmp_path / str(seed), seed=seed) for seed in range(2)]
    average_models([str(source) for source in sources], tmp_path / "mean")
    biases = [load_file(tmp_path / name / "model.safetensors")[ROUTER_BIAS] for name in ("0", "1", "mean")]
    torch.testing.assert_close(biases[2], (biases[0] + biases[1]) / 2)


@pytest.mark.parametrize("target", [".", ".."])
def test_the_working_folder_is_no_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    base, work = new_model(tmp_path / "base"), tmp_path / "a/work"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    with pytest.raises(ConfigError, match=r"already exists; choose a new folder"):
        average_models([str(base), str(base)], Path(target))
    assert not list(work.iterdir())


def test_a_merged_model_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    base = new_model(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "model.norm.weight"}, base / "model.safetensors")
    adapter = new_adapter(tmp_path / "adapter", base)
    with pytest.raises(CheckpointError, match=r"the merged model lacks 1 tensors, among them model\.norm\.weight"):
        merge_adapter(str(adapter), tmp_path / "merged", base=str(base))
    assert not (tmp_path / "merged").exists()


def test_the_average_of_mixtures_of_experts(tmp_path: Path) -> None:
    sources = [new_experts(tmp_path / str(seed), seed=seed) for seed in range(3)]
    report = average_models([str(source) for source in sources], tmp_path / "mean")
    tensors = [load_file(source / "model.safetensors") for source in sources]
    for name, mean in load_file(tmp_path / "mean/model.safetensors").items():
        torch.testing.assert_close(mean, sum(one[name] for one in tensors) / 3)
    assert report.logit_gap < 1e-5


def test_the_critic_of_a_checkpoint(tmp_path: Path, tiny_model_path: Path) -> None:
    critic = load_value_model(str(tiny_model_path), dtype=torch.float32, device=torch.device("cpu"))
    torch.nn.init.normal_(critic.get_parameter("score.weight"))
    SingleRankGroup("critic", critic, config().trainer, ValueObjective(0.2)).save(tmp_path / "step/critic")
    merge_checkpoint(tmp_path / "step", tmp_path / "merged", role="critic")
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(critic))


def test_the_reward_model_of_a_checkpoint(tmp_path: Path, tiny_model_path: Path) -> None:
    cpu, key = torch.device("cpu"), "trainer.policy.model.path"
    model = load_reward_model(str(tiny_model_path), dtype=torch.float32, device=cpu, key=key, pad_token_id=0)
    torch.nn.init.normal_(model.get_parameter("score.weight"))
    SingleRankGroup("reward", model, config().trainer, RewardObjective()).save(tmp_path / "step/reward")
    merge_checkpoint(tmp_path / "step", tmp_path / "merged", role="reward")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert (merged.config.num_labels, merged.config.pad_token_id) == (1, 0)
    torch.testing.assert_close(logits(merged), logits(model))


def trained_head(
    folder: Path, base: Path, role: Role, tokenizer: PreTrainedTokenizerBase, **lora: Any
) -> PreTrainedModel:
    """Save and export a critic or reward model with a random adapter and head; return the model."""
    cpu, section = torch.device("cpu"), {"model": {"path": str(base), "lora": {"rank": 4, **lora}}}
    if role == "critic":
        model = load_value_model(str(base), dtype=torch.float32, device=cpu)
        group = SingleRankGroup(role, model, config(critic=section).trainer, ValueObjective(0.2), tokenizer)
    else:
        pad = tokenizer.pad_token_id
        model = load_reward_model(str(base), dtype=torch.float32, device=cpu, key="path", pad_token_id=pad)
        group = SingleRankGroup(role, model, config(policy=section).trainer, RewardObjective(), tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    group.save(folder / "step" / role)
    complete(group.group.export(folder / "adapter"))
    return model


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("role", ["critic", "reward"])
def test_the_adapter_of_a_critic_or_reward_model_is_merged_with_its_head(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, tiny_model_path: Path, role: Role, has_head: bool
) -> None:
    base = tmp_path / "base"
    if has_head:  # as a base that was trained before
        model = AUTO_CLASSES[role].from_pretrained(tiny_model_path, num_labels=1)
        model.config.pad_token_id = tiny_tokenizer.pad_token_id
    else:
        model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.bfloat16)
    model.save_pretrained(base)
    expected = logits(trained_head(tmp_path, base, role, tiny_tokenizer))
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
    assert rounded.logit_gap < TYPES["float32" if has_head else "bfloat16"]
    with pytest.raises(CheckpointError, match=r"the average of .* has the weights of"):
        average_models([str(checkpoint), str(export)], tmp_path / "mean")
    if has_head:
        assert average_models([str(export), str(base)], tmp_path / "mean").logit_gap < 1e-5


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_the_adapter_of_a_critic_or_reward_model_is_merged_with_buffers(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, role: Role
) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    settings = SMALL | {"num_key_value_heads": 4} | experts | heads
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(**settings, n_group=1, topk_group=1))
    model.get_buffer(ROUTER_BIAS).copy_(torch.tensor([1.0, -1.0, 2.0, 0.5]))
    model.save_pretrained(tmp_path / "base")
    expected = logits(trained_head(tmp_path, tmp_path / "base", role, tiny_tokenizer, target_modules=["o_proj"]))
    report = merge_checkpoint(tmp_path / "step", tmp_path / "merged", role=role)
    merged = AUTO_CLASSES[role].from_pretrained(report.folder)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_the_adapter_of_a_critic_or_reward_model_with_experts_is_merged(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, role: Role
) -> None:
    base = new_experts(tmp_path / "base")
    expected = logits(trained_head(tmp_path, base, role, tiny_tokenizer, target_modules=["q_proj", "v_proj"]))
    for report in (
        merge_checkpoint(tmp_path / "step", tmp_path / "of the checkpoint", role=role),
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "of the export"),
    ):
        torch.testing.assert_close(logits(AUTO_CLASSES[role].from_pretrained(report.folder)), expected)
        assert "lm_head.weight" not in load_file(report.folder / "model.safetensors")
    tensors = load_file(base / "model.safetensors")
    tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    save_file(tensors, base / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has no model.layers.1.mlp.experts.2.up_proj.weight, which the adapter"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")


def test_an_adapter_with_a_head_that_its_kind_of_model_lacks_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    trained_head(tmp_path, new_model(tmp_path / "base"), "reward", tiny_tokenizer)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"task_type": "CAUSAL_LM"}))
    with pytest.raises(ConfigError, match="task_type=CAUSAL_LM has none; set SEQ_CLS for a reward model"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")


def test_a_reward_model_needs_a_pad_token(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase) -> None:
    trained_head(tmp_path, new_model(tmp_path / "base"), "reward", tiny_tokenizer)
    for file in (tmp_path / "adapter").glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"neither the adapter .* nor its base has a tokenizer"):
        merge_adapter(str(tmp_path / "adapter"), tmp_path / "merged")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_of_an_untrained_model_is_refused(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """Weights that were only rounded when the run started are untrained."""
    base, section = new_model(tmp_path / "base"), {"model": {"path": str(tmp_path / "base")}}
    model = load_model(str(base), dtype=getattr(torch, dtype), device=torch.device("cpu"))
    make_worker(model, tokenizer=tiny_tokenizer, policy=section).save(tmp_path / "step/policy")
    command = ["merge", "checkpoint", str(tmp_path / "step")]
    assert main([*command, str(tmp_path / "merged")]) == 1
    assert f"has the weights of {base}, which its run started from" in capsys.readouterr().err
    assert not list(tmp_path.glob("*merged*"))
    assert main([*command, str(tmp_path / "merged"), "--allow-unchanged"]) == 0
    assert "25 tensors, 0 of them changed" in capsys.readouterr().out
    assert {str(one.dtype) for one in load_file(tmp_path / "merged/model.safetensors").values()} == {f"torch.{dtype}"}
    base.rename(tmp_path / "moved")
    assert main([*command, str(tmp_path / "copy")]) == 0
    assert "25 tensors, not compared with the base" in capsys.readouterr().out
    assert main([*command, str(tmp_path / "other"), "--base", str(tmp_path / "moved")]) == 1
    assert f"has the weights of {tmp_path / 'moved'}" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_an_untrained_head_is_no_change(tmp_path: Path, tiny_model_path: Path, role: Role) -> None:
    cpu = torch.device("cpu")
    if role == "critic":
        model = load_value_model(str(tiny_model_path), dtype=torch.float32, device=cpu)
    else:
        model = load_reward_model(str(tiny_model_path), dtype=torch.float32, device=cpu, key="path", pad_token_id=0)
    SingleRankGroup(role, model, config().trainer, None).save(tmp_path / "step" / role)
    with pytest.raises(CheckpointError, match="nothing was trained"):
        merge_checkpoint(tmp_path / "step" / role, tmp_path / "merged")
    torch.nn.init.ones_(model.get_parameter("score.weight"))
    SingleRankGroup(role, model, config().trainer, None).save(tmp_path / "next" / role)
    assert merge_checkpoint(tmp_path / "next" / role, tmp_path / "merged").n_changed == 1


PEAK = """
import resource, sys
from pathlib import Path
from skyrl_train.checkpoint import merge, model_folder
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{call}
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def peak_bytes(call: str) -> int:
    """Return the memory that a merge takes in a process of its own, beside that of the imported packages."""
    command = [sys.executable, "-c", PEAK.format(call=call)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return int(output.split()[-1])


@pytest.mark.parametrize("kind", ["adapter", pytest.param("checkpoint", marks=pytest.mark.nightly), "average"])
@pytest.mark.parametrize("n_layers", [12, pytest.param(72, marks=pytest.mark.nightly)])
def test_a_merge_takes_little_more_memory_than_the_model(tmp_path: Path, kind: str, n_layers: int) -> None:
    """Models of 0.2 and 1.1 billion parameters. The merged model is loaded once, for the comparison of logits."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": n_layers, "vocab_size": 16_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True))
    n_bytes, target = 4 * model.num_parameters(), f"Path({str(tmp_path / 'merged')!r})"
    assert round(model.num_parameters() / 1e9, 1) == (0.2 if n_layers == 12 else 1.1)
    if kind == "adapter":
        model.save_pretrained(tmp_path / "base")
        call = f"merge.merge_adapter({str(new_adapter(tmp_path / 'adapter', tmp_path / 'base', rank=8))!r}, {target})"
    elif kind == "checkpoint":
        model.save_pretrained(tmp_path / "base")
        model.config.name_or_path = str(tmp_path / "base")  # which is compared with the checkpoint
        torch.nn.init.normal_(model.get_parameter("model.norm.weight"))
        SingleRankGroup("ref", model, config().trainer, None).save(tmp_path / "step/policy")
        call = f"merge.merge_checkpoint(Path({str(tmp_path / 'step')!r}), {target})"
    else:
        for name in ("one", "other"):
            model.save_pretrained(tmp_path / name)
            torch.nn.init.normal_(model.get_parameter("model.norm.weight"))
        call = f"merge.average_models([{str(tmp_path / 'one')!r}, {str(tmp_path / 'other')!r}], {target})"
    del model
    assert (peak := peak_bytes(call)) < 1.3 * n_bytes, f"{peak:,} of {n_bytes:,}"
    assert (tmp_path / "merged/config.json").is_file()


def test_the_base_of_a_checkpoint_must_be_the_one_that_was_trained(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerBase
) -> None:
    base, other = new_model(tmp_path / "base"), new_model(tmp_path / "other", seed=1)
    model = load_model(str(base), dtype=torch.float32, device=torch.device("cpu"))
    trained(tmp_path / "step", model, tiny_tokenizer, model={"path": str(base), "lora": {"rank": 4}})
    with pytest.raises(CheckpointError, match=r"trained on other weights than those of .*other .*--base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "merged", base=str(other))
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"there is no model .*base"):
        merge_checkpoint(tmp_path / "step", tmp_path / "merged")
    merge_checkpoint(tmp_path / "step/policy", tmp_path / "merged", base=str(tmp_path / "moved"))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, tiny_model: PreTrainedModel, tiny_tokenizer: Any) -> None:
    step = tmp_path / "ckpts/global_step_2"
    trained(step, copy.deepcopy(tiny_model), tiny_tokenizer)
    write_manifest(step)
    (tmp_path / "ckpts/latest_ckpt_global_step.txt").write_text("2\n")
    merge_checkpoint(tmp_path / "ckpts", tmp_path / "merged")
    file = step / "policy/__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has [\d,]+ bytes instead of"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again")
    with pytest.raises(CheckpointError, match="has no checkpoint of a critic"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again", role="critic")
    (step / "checksums.json").unlink()
    with pytest.raises(ConfigError, match="there is no model x"):
        merge_checkpoint(tmp_path / "ckpts", tmp_path / "again", base="x")


def wrong_verification(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(adapter_merge, "_apply_changes", lambda source, *others: _scaled(source, others[-1]))


def _scaled(source: Any, tally: Any) -> Any:
    tally.n_changed = 1
    for spec in source.specs:
        yield spec.name, source.read(spec.name) * 1.01


def full_disk(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_folder.shutil, "disk_usage", lambda _: model_folder.shutil._ntuple_diskusage(10, 10, 0))


def zero_alpha(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": 0}))


def untrained(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    new_adapter(adapter, base, scale=0.0)


def other_base(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    new_adapter(adapter, new_model(base.with_name("wide"), hidden_size=64))
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))


def no_base(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))


def no_weights(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    (base / "model.safetensors").unlink()


def truncated_weights(base: Path, adapter: Path, patch: pytest.MonkeyPatch) -> None:
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:500])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (wrong_verification, "the merged model is wrong, and nothing was written: its logits differ from"),
        (full_disk, "could not be written: [0-9,]+ bytes are needed and 0 are free"),
        (zero_alpha, "would change none of the 25 tensors of .*: its alpha is 0"),
        (untrained, "would change none of the 25 tensors of .*: B·A is 0"),
        (other_base, "does not fit"),
        (no_base, "does not name its base model; name it with --base"),
        (no_weights, "has no .*safetensors; save the model"),
        (truncated_weights, "model.safetensors cannot be read"),
    ],
)
def test_nothing_is_left_of_a_merge_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[Path, Path, pytest.MonkeyPatch], None],
    message: str,
) -> None:
    base = new_model(tmp_path / "base")
    adapter = new_adapter(tmp_path / "adapter", base)
    harm(base, adapter, monkeypatch)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        merge_adapter(str(adapter), tmp_path / "out/merged")
    assert not list((tmp_path / "out").glob(".*"))
    assert not (tmp_path / "out/merged").exists()


def test_a_folder_belongs_to_one_merge(tmp_path: Path) -> None:
    base = new_model(tmp_path / "base")
    adapter = str(new_adapter(tmp_path / "adapter", base))
    (tmp_path / ".merged.partial/left").mkdir(parents=True)  # by a process that was killed
    (tmp_path / ".merged.partial/model.safetensors").write_text("half")
    with folder_lock(tmp_path / ".merged.partial", ""), pytest.raises(ConfigError, match="is in use by process"):
        merge_adapter(adapter, tmp_path / "merged")
    merge_adapter(adapter, tmp_path / "merged")
    assert not (tmp_path / ".merged.partial").exists()
    assert not {path.name for path in (tmp_path / "merged").iterdir()} & {"left", ".lock"}
    before = (tmp_path / "merged/model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="merged already exists; choose a new folder"):
        merge_adapter(adapter, tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").stat().st_mtime_ns == before


def test_models_that_cannot_be_averaged_are_refused(tmp_path: Path) -> None:
    one, other = (str(new_model(tmp_path / str(i), seed=i)) for i in range(2))
    wide = str(new_model(tmp_path / "wide", hidden_size=64))
    for sources, weights, message in (
        ([one], None, "two or more models, and 1 was given"),
        ([one, other], [0.5, 0.6], "2 weights with the sum 1.1 for 2 models"),
        ([one, other], [1.0], "1 weights with the sum 1 for 2 models"),
        ([one, wide], None, r"has shape .* in .*, but .* in .*wide; average models of the same architecture"),
        ([one, one], None, "has the weights of"),
        ([one, str(tmp_path / "none")], None, "there is no model"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            average_models(sources, tmp_path / "mean", weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "wide"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = new_model(tmp_path / "base")
    adapter = new_adapter(tmp_path / "adapter", base)
    assert main(["merge", "adapter", str(adapter), str(tmp_path / "merged")]) == 0
    assert "25 tensors, 14 of them changed; the logits are those of the sources up to" in capsys.readouterr().out
    assert (
        main(["merge", "average", str(base), str(tmp_path / "merged"), str(tmp_path / "mean"), "--dtype=bfloat16"]) == 0
    )
    assert main(["merge", "average", str(base), str(base), str(tmp_path / "same")]) == 1
    assert main(["merge", "checkpoint", str(base), str(tmp_path / "same"), "--role=actor"]) == 1
    errors = capsys.readouterr().err
    assert "error: the average of" in errors
    assert "error: --role=actor must be one of policy, critic, reward" in errors
