"""Runs with a low-rank adapter: metrics, outputs, resuming, continuing from an adapter, and evaluation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from skyrl_train.entrypoints.cli import main as skyrl
from skyrl_train.entrypoints.main_base import BasePPOExp, parse_cli
from skyrl_train.entrypoints.main_generate import main as generate
from skyrl_train.entrypoints.plan import describe_plan

LORA = [
    "trainer.policy.model.lora.rank=4",
    "trainer.policy.optimizer_config.lr=1e-2",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.hf_save_interval=100",
]


def rows(tmp_path: Path, name: str = "test_run") -> list[dict[str, Any]]:
    lines = (tmp_path / f"skyrl/{name}/metrics.jsonl").read_text().splitlines()
    timed = ("timing/", "trainer/tokens_per_second")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(timed)} for line in lines]


def adapter(tmp_path: Path, step: int, name: str = "test_run") -> Path:
    return tmp_path / f"skyrl/{name}/export/global_step_{step}/policy"


def run(overrides: list[str]) -> BasePPOExp:
    experiment = BasePPOExp(parse_cli(overrides))
    experiment.run()
    return experiment


def test_the_engine_samples_with_the_current_adapter(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run([*catch_run, *LORA, "trainer.epochs=2"])
    steps = rows(tmp_path)[1:]
    for step in steps:
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < 1e-5
    assert steps[0]["policy/policy_kl"] == 0, "the reference is the policy before the first update"
    assert steps[-1]["policy/policy_kl"] > 1e-3
    norms = [step["policy/adapter_norm"] for step in steps]
    assert 0 < norms[0] < norms[-1]
    assert "Loaded the reference" not in caplog.text
    assert "of 205,696 parameters are trained" in caplog.text


def test_an_adapter_is_exported_continued_evaluated_and_merged(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*catch_run, *LORA])
    exported = adapter(tmp_path, 2)
    assert not (exported / "model.safetensors").exists()
    last = {key: value for key, value in rows(tmp_path)[-1].items() if key.startswith("eval/")}
    path = f"trainer.policy.model.lora.lora_path='{exported}'"

    generate([*catch_run, "trainer.run_name=evaluated", path])
    assert rows(tmp_path, "evaluated")[0].items() >= last.items()

    run([*catch_run, path, "trainer.run_name=continued", "trainer.hf_save_interval=1"])
    continued = rows(tmp_path, "continued")
    assert continued[0].items() >= last.items(), "the run starts where the adapter stopped"
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (exported, adapter(tmp_path, 2, "continued"))
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())

    merged = tmp_path / "merged"
    assert skyrl(["merge", "checkpoint", str(tmp_path / "skyrl/test_run/ckpts"), str(merged)]) == 0
    plain = [override for override in catch_run if not override.startswith("trainer.policy.model.path=")]
    generate([*plain, f"trainer.policy.model.path='{merged}'", "trainer.run_name=merged"])
    assert rows(tmp_path, "merged")[0] == rows(tmp_path, "evaluated")[0]


def test_a_critic_and_a_reference_that_follows_an_adapter(
    catch_run: list[str], tiny_model_path: Path, tmp_path: Path
) -> None:
    run(
        [
            *catch_run,
            *LORA,
            f"trainer.critic.model.path='{tiny_model_path}'",
            "trainer.critic.model.lora.rank=2",
            "trainer.critic.model.lora.merge_on_export=true",
            "trainer.critic_mini_batch_size=4",
            "trainer.critic.optimizer_config.lr=1e-2",
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.update_ref_every_epoch=true",
            "trainer.epochs=2",
        ]
    )
    steps = rows(tmp_path)[1:]
    # the value head starts at zero, so that only its own gradient is not 0 in the first update
    assert [step["critic/adapter_norm"] > 0 for step in steps] == [False, True, True, True]
    kl = [step["policy/policy_kl"] for step in steps]
    assert kl[1] > 1e-4
    assert kl[2] < 1e-8, "the reference is the policy after the first epoch"
    assert (adapter(tmp_path, 4).with_name("critic") / "lora_adapter/adapter_config.json").exists()
    assert "score.weight" in load_file(adapter(tmp_path, 4).with_name("critic") / "model.safetensors")


def test_a_merged_export(catch_run: list[str], tiny_model_path: Path, tmp_path: Path) -> None:
    run([*catch_run, *LORA, "trainer.policy.model.lora.merge_on_export=true"])
    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny_model_path, adapter(tmp_path, 2)))
    assert base.keys() == merged.keys()
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, merged[name])}
    assert len(changed) == 2 * 7
    AutoModelForCausalLM.from_pretrained(adapter(tmp_path, 2))


def test_a_killed_run_ends_like_an_uninterrupted_one(catch_run: list[str], tmp_path: Path) -> None:
    overrides = [*catch_run, *LORA, "trainer.epochs=3", "trainer.ckpt_interval=2", "trainer.eval_interval=3"]
    overrides += ["generator.batched=true"]  # the order of calls does not depend on the load of the machine
    command = [sys.executable, "-m", "examples.catch.main_catch", *overrides]
    folder = Path(__file__).parents[2]
    process = subprocess.Popen(
        [*command, f"trainer.output_dir='{tmp_path}/killed'"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics, deadline = tmp_path / "killed/skyrl/test_run/metrics.jsonl", time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 4:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    for output in ("killed", "whole"):
        run([*overrides, f"trainer.output_dir='{tmp_path}/{output}'"])
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    killed, whole = (
        load_file(adapter(tmp_path / output, 6) / "adapter_model.safetensors") for output in ("killed", "whole")
    )
    for name, tensor in whole.items():
        assert torch.equal(tensor, killed[name]), name


def test_the_plan_counts_what_is_trained(catch_run: list[str], tiny_model_path: Path) -> None:
    plan = describe_plan(parse_cli([*catch_run, *LORA]))
    assert "LoRA rank 4, alpha 16 · 11,776 trained parameters · float32" in plan
    assert "reference    the policy without its adapter" in plan
    n_bytes = 193_920 * 4 + 11_776 * 4 * 4  # the base, and values, gradients and moments of the adapter
    assert f"memory       {n_bytes / 1000:.3g} KB for weights" in plan
    assert f"disk         {11_776 * 4 * 3 / 1000:.3g} KB per checkpoint" in plan
    follows = describe_plan(parse_cli([*catch_run, *LORA, "trainer.update_ref_every_epoch=true"]))
    assert f"disk         {(11_776 * 4 * 3 + 193_920 * 4) / 1000:.3g} KB per checkpoint" in follows
    without = describe_plan(parse_cli([*catch_run, "trainer.algorithm.use_kl_loss=true"]))
    assert f"reference    {tiny_model_path}" in without


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rank=4", "dropout=0.1"], ["lora.dropout=0.1", "set trainer.policy.model.lora.dropout=0"]),
        (["lora_path=x", "target_modules=[q_proj]"], ["target_modules=[q_proj]", "has its own matrices"]),
        (["rank=-1"], ["lora.rank=-1 must be an integer >= 0"]),
        (["rank=4", "init_method=pissa"], ["init_method=pissa must be one of kaiming, gaussian"]),
        (["lora_path=/no/such/adapter"], ["lora_path=/no/such/adapter: there is no such folder"]),
        (["rank=4", "target_modules=[qproj]"], ["no module qproj", "q_proj"]),
    ],
)
def test_settings_that_are_impossible_are_named(
    catch_run: list[str], capsys: pytest.CaptureFixture[str], overrides: list[str], words: list[str]
) -> None:
    assert skyrl(["train", *catch_run, *(f"trainer.policy.model.lora.{one}" for one in overrides)]) == 1
    message = capsys.readouterr().err
    for word in words:
        assert word in message


def test_settings_of_an_adapter_that_is_off_are_reported(
    catch_run: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    BasePPOExp(parse_cli([*catch_run, "trainer.policy.model.lora.alpha=32"]))
    assert "trainer.policy.model.lora.alpha=32 has no effect, because trainer.policy.model.lora.rank=0" in caplog.text


def test_the_names_of_verl_and_earlier_versions(catch_run: list[str]) -> None:
    cfg = parse_cli(
        [
            *catch_run,
            "+actor_rollout_ref.model.lora_rank=64",
            "+actor_rollout_ref.model.lora_alpha=32",
            "+actor_rollout_ref.model.target_modules=all-linear",
            "+actor_rollout_ref.rollout.layered_summon=true",
            "+trainer.policy.model.lora.init=gaussian",
        ]
    )
    lora = cfg.trainer.policy.model.lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.init_method) == (64, 32, "all-linear", "gaussian")
