"""Runs with a low-rank adapter: metrics, outputs, resuming, continuing from an adapter, and evaluation."""

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from train_kit.checkpoints import assert_a_changed_byte_is_named
from train_kit.models import load_on_cpu
from train_kit.runs import assert_equal_runs, stop_after, train
from transformers import AutoModelForCausalLM

from skyrl_train.entrypoints.cli import main
from skyrl_train.entrypoints.describe_plan import describe_plan, plan_run
from skyrl_train.entrypoints.main_base import parse_cli

LORA = [
    "trainer.policy.model.lora.rank=4",
    "trainer.policy.optimizer_config.lr=1e-2",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.hf_save_interval=100",
]


def test_the_engine_samples_with_the_current_adapter_and_the_export_is_merged(
    catch_run: list[str], tiny_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    merging = "trainer.policy.model.lora.merge_on_export=true"
    run = train(*catch_run, *LORA, merging, "trainer.epochs=2", "trainer.eval_interval=-1")
    steps = run.metrics[1:]
    for step in steps:
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
    assert steps[0]["policy/policy_kl"] == 0, "the reference is the policy before the first update"
    assert steps[-1]["policy/policy_kl"] > 1e-3
    norms = [step["policy/adapter_norm"] for step in steps]
    assert 0 < norms[0] < norms[-1]
    assert "Loaded the reference" not in caplog.text
    assert "of 205,696 parameters are trained" in caplog.text

    base, merged = load_file(tiny_model_path / "model.safetensors"), run.weights(4)
    assert base.keys() == merged.keys()
    assert len([name for name, tensor in base.items() if not torch.equal(tensor, merged[name])]) == 2 * 7
    AutoModelForCausalLM.from_pretrained(run.export(4))


def test_an_adapter_is_exported_continued_evaluated_and_merged(catch_run: list[str], tmp_path: Path) -> None:
    run = train(*catch_run, *LORA)
    exported = run.export(2)
    assert not (exported / "model.safetensors").exists()
    last = {name: value for name, value in run.reproducible_metrics[-1].items() if name.startswith("eval/")}
    path = f"trainer.policy.model.lora.lora_path='{exported}'"

    evaluated = train(*catch_run, "trainer.run_name=evaluated", path, command="generate").reproducible_metrics[0]
    assert evaluated.items() >= last.items()

    shorter = ["trainer.max_training_steps=1", "trainer.hf_save_interval=1"]
    for in_reward, metric in (("true", "loss/avg_kl"), ("false", "policy/policy_kl")):
        kl = [f"trainer.algorithm.use_kl_in_reward={in_reward}", f"trainer.algorithm.use_kl_loss={in_reward != 'true'}"]
        continued = train(*catch_run, path, f"trainer.run_name=continued_{in_reward}", *shorter, *kl)
        assert continued.metrics[1][metric] == pytest.approx(0, abs=1e-6), "the reference has the adapter, too"
    assert continued.metrics[0].items() >= last.items(), "the run starts where the adapter stopped"
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (exported, continued.export(1)))
    assert before.keys() == after.keys()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    merged = tmp_path / "merged"
    assert main(["merge", "checkpoint", str(run.folder / "ckpts"), str(merged)]) == 0
    merged_model = ["trainer.run_name=merged", f"trainer.policy.model.path='{merged}'"]
    assert train(*catch_run, *merged_model, command="generate").reproducible_metrics[0] == evaluated


def test_a_critic_and_a_reference_that_follows_an_adapter(catch_run: list[str], tiny_model_path: Path) -> None:
    settings = [
        f"trainer.critic.model.path='{tiny_model_path}'",
        "trainer.critic.model.lora.rank=2",
        "trainer.critic.model.lora.merge_on_export=true",
        "trainer.critic_mini_batch_size=4",
        "trainer.critic.optimizer_config.lr=1e-2",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.update_ref_every_epoch=true",
        "trainer.epochs=2",
        "trainer.eval_interval=-1",
    ]
    run = train(*catch_run, *LORA, *settings)
    # The value head starts at zero, so only its own gradient differs from 0 in the first update.
    assert [step["critic/adapter_norm"] > 0 for step in run.metrics[1:]] == [False, True, True, True]
    kl = [step["policy/policy_kl"] for step in run.metrics[1:]]
    assert kl[1] > 1e-4
    assert kl[2] < 1e-8, "the reference is the policy after the first epoch"
    assert (run.export(4, "critic") / "lora_adapter/adapter_config.json").exists()
    assert "score.weight" in run.weights(4, "critic")


def test_a_run_with_a_base_in_4_bits(catch_run: list[str], tmp_path: Path, tiny_model_path: Path) -> None:
    quantized = [*LORA, "trainer.policy.model.lora.quantize_base=nf4", "trainer.gradient_checkpointing=true"]
    run = train(*catch_run, *quantized)
    for step in run.metrics[1:]:
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
    assert run.metrics[1]["policy/policy_kl"] == 0, "the reference is the policy before the first update"

    # The reference of a continued adapter has a separate base in 4 bits.
    settings = [f"trainer.policy.model.lora.lora_path='{run.export(2)}'", "trainer.max_training_steps=1"]
    continued = train(*catch_run, *quantized, *settings, "trainer.run_name=continued")
    assert continued.metrics[1]["policy/policy_kl"] == pytest.approx(0, abs=1e-6)

    merged = tmp_path / "merged"
    assert main(["merge", "checkpoint", str(run.folder / "ckpts"), str(merged)]) == 0
    tokens = torch.arange(3, 23)[None]
    theirs = peft.PeftModel.from_pretrained(load_on_cpu(tiny_model_path), str(run.export(2)))
    expected = theirs(input_ids=tokens).logits.log_softmax(-1)
    found = load_on_cpu(merged)(input_ids=tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_stopped_run_has_a_whole_checkpoint_and_resumes_exactly(catch_run: list[str]) -> None:
    overrides = [*catch_run, *LORA, "trainer.epochs=2", "trainer.eval_interval=-1", "generator.batched=true"]
    whole = train(*overrides, "trainer.run_name=whole")
    checkpoint = stop_after(1, *overrides).folder / "ckpts/global_step_1"
    assert (checkpoint / "policy/lora_adapter/adapter_model.safetensors").exists()
    assert_a_changed_byte_is_named(checkpoint)
    assert_equal_runs(train(*overrides), whole)


def test_the_plan_counts_what_is_trained(catch_run: list[str], tiny_model_path: Path) -> None:
    plan = describe_plan(plan_run(parse_cli([*catch_run, *LORA])))
    assert "LoRA rank 4, alpha 16 · 11,776 trained parameters · float32" in plan
    assert "reference    the policy without its adapter" in plan
    n_bytes = 193_920 * 4 + 11_776 * 4 * 4  # the base, and values, gradients and moments of the adapter
    assert f"memory       {n_bytes / 1000:.3g} KB for weights" in plan
    assert f"disk         {11_776 * 4 * 3 / 1000:.3g} KB per checkpoint" in plan
    follows = describe_plan(plan_run(parse_cli([*catch_run, *LORA, "trainer.update_ref_every_epoch=true"])))
    assert f"disk         {(11_776 * 4 * 3 + 193_920 * 4) / 1000:.3g} KB per checkpoint" in follows
    without = describe_plan(plan_run(parse_cli([*catch_run, "trainer.algorithm.use_kl_loss=true"])))
    assert f"reference    {tiny_model_path}" in without
