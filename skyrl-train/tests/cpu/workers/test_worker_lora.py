"""A worker with a low-rank adapter: updates, the reference, checkpoints and exports."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from train_kit.batches import random_batch
from train_kit.models import perturbed
from train_kit.workers import SingleRankGroup, complete, config, gradients, make_worker
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms import advantage_estimator
from skyrl_train.errors import CheckpointError
from skyrl_train.learner import Learner
from skyrl_train.models.lora import trained_parameters

OPTIMIZER = {"lr": 1e-2, "scheduler": "linear", "num_warmup_steps": 2}


def lora_worker(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **lora: Any
) -> SingleRankGroup:
    section = {"model": {"lora": {"rank": 4, **lora}}, "optimizer_config": OPTIMIZER}
    return make_worker(model, tokenizer=tokenizer, policy=section)


def test_an_update_changes_the_adapter_like_adamw_and_nothing_else(policy: PreTrainedModel) -> None:
    before = {name: p.clone() for name, p in policy.named_parameters()}
    worker = lora_worker(policy)
    trained = trained_parameters(policy)
    mirror = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(mirror.values(), weight_decay=0.01)
    for step, seed in enumerate(range(3)):
        gradient = gradients(worker, random_batch(seed))
        assert gradient.keys() == trained.keys()
        norm = torch.stack([g.norm() for g in gradient.values()]).norm().item()
        for name, p in mirror.items():
            p.grad = gradient[name] * min(1.0, 1.0 / norm)
        optimizer.param_groups[0]["lr"] = 1e-2 * min(step / 2, 1.0)  # two steps of warm-up
        optimizer.step()
        metrics = complete(worker.group.optim_step()).numbers()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        for name, p in trained.items():
            torch.testing.assert_close(p.detach(), mirror[name], rtol=1e-5, atol=1e-7)
    assert metrics["adapter_norm"] > 0
    assert any((p != mirror[name] * 0).any() for name, p in trained.items() if ".lora_B." in name)
    for name, p in policy.named_parameters():
        if name not in trained:
            assert torch.equal(p, before[name.replace(".base_layer.", ".")]), name


def test_the_reference_is_bitwise_the_base(policy: PreTrainedModel, tiny_model: PreTrainedModel) -> None:
    worker = lora_worker(policy)
    cfg = config().trainer
    learner = Learner(cfg, advantage_estimator("grpo"), policy=worker.group, ref=worker.group)
    rows = random_batch(0)
    expected = SingleRankGroup("ref", copy.deepcopy(tiny_model), cfg, None).score(rows)["logprobs"]
    assert torch.equal(complete(learner.score(rows)).ref_logprobs, expected)  # before the first update
    for seed in range(3):
        worker.update(random_batch(seed))
    assert torch.equal(complete(learner.score(rows)).ref_logprobs, expected)
    assert (worker.score(rows)["logprobs"] - expected).abs().max() > 1e-3


@pytest.mark.parametrize("quantize_base", ["none", "nf4"])
def test_save_and_load_continue_bit_for_bit(
    policy: PreTrainedModel, tiny_model: PreTrainedModel, tmp_path: Path, quantize_base: str
) -> None:
    first = lora_worker(policy, quantize_base=quantize_base)
    for seed in range(2):
        first.update(random_batch(seed))
    first.save(tmp_path / "policy")
    names = FileSystemReader(tmp_path / "policy").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in names if name.startswith("model."))
    second = lora_worker(copy.deepcopy(tiny_model), quantize_base=quantize_base)
    second.load(tmp_path / "policy")
    for seed in range(2, 4):
        assert first.update(random_batch(seed)) == second.update(random_batch(seed))
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_a_checkpoint_holds_the_adapter_in_the_format_of_peft_and_the_checksum_of_its_base(
    policy: PreTrainedModel, tiny_model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = lora_worker(policy)
    for seed in range(2):
        worker.update(random_batch(seed))
    worker.save(tmp_path / "policy")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_model), str(tmp_path / "policy/lora_adapter"))
    tokens = torch.arange(3, 13)[None]
    assert torch.equal(theirs(input_ids=tokens).logits, policy(input_ids=tokens).logits)
    size = sum(file.stat().st_size for file in (tmp_path / "policy").glob("*.distcp"))
    full = make_worker(copy.deepcopy(tiny_model))
    assert worker.group.facts.checkpoint_bytes < full.group.facts.checkpoint_bytes / 10 < size
    worker.load(tmp_path / "policy")
    assert "base_checksum.txt" not in caplog.text
    (tmp_path / "policy/base_checksum.txt").unlink()
    worker.load(tmp_path / "policy")
    assert "base_checksum.txt is missing, as in checkpoints of old versions" in caplog.text


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rank": 8}, "Size mismatch.*lora_A"),
        ({"target_modules": ["q_proj"]}, r"the model lacks 24 of its 28 tensors, among them .*lora_A"),
        ({"base": True}, "trained on weights that differ from"),
        ({"base": True, "quantize_base": "nf4"}, "trained on weights that differ from"),
        ({"quantize_base": "nf4"}, "trained with trainer.policy.model.lora.quantize_base=none, not nf4"),
        ({"saved_full": True}, "holds a full model, but trainer.policy.model.lora trains an adapter"),
        ({"loaded_full": True}, "Missing key"),
    ],
)
def test_a_checkpoint_of_another_adapter_or_base_is_refused(
    policy: PreTrainedModel, tiny_model: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    make = make_worker if "saved_full" in changes else lora_worker
    worker = make(policy)
    worker.update(random_batch(0))
    worker.save(tmp_path / "policy")
    model = perturbed(tiny_model, 1e-3, seed=1) if "base" in changes else copy.deepcopy(tiny_model)
    if "loaded_full" in changes:
        other = make_worker(model)
    else:
        lora = {key: value for key, value in changes.items() if key in ("rank", "target_modules", "quantize_base")}
        other = lora_worker(model, **lora)
    with pytest.raises(CheckpointError, match=rf"cannot resume the policy from .*{fault}"):
        other.load(tmp_path / "policy")


@pytest.mark.parametrize("is_merged", [False, True])
def test_an_export_is_the_adapter_or_the_merged_model(
    policy: PreTrainedModel,
    tiny_model: PreTrainedModel,
    tiny_tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    is_merged: bool,
) -> None:
    worker = lora_worker(policy, tiny_tokenizer, merge_on_export=is_merged)
    for seed in range(2):
        worker.update(random_batch(seed))
    complete(worker.group.export(tmp_path))
    tokens = torch.arange(3, 13)[None]
    expected = policy(input_ids=tokens).logits
    assert (expected - tiny_model(input_ids=tokens).logits).abs().max() > 1e-3
    adapter = tmp_path / "lora_adapter" if is_merged else tmp_path
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_model), str(adapter))
    assert torch.equal(theirs(input_ids=tokens).logits, expected)
    assert (tmp_path / "tokenizer.json").exists()
    if is_merged:
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(merged(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
    else:
        assert not (tmp_path / "model.safetensors").exists()
