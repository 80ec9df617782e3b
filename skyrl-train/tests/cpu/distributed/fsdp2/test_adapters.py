"""FSDP over gloo ranks with a low-rank adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.batches import off_policy_batch, random_batch
from train_kit.ranks import load_group, load_policy, save, single_rank, spec
from train_kit.weight_sync import MirroredSink
from train_kit.workers import config, policy_objective
from transformers import PreTrainedModel

from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.launch.process import ProcessRank
from skyrl_train.weight_sync import SyncOptions, WeightSync

LORA = {"model": {"lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-3}}


async def test_ranks_drop_different_inputs_of_an_adapter_in_updates_only(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    cfg = config(policy=LORA, micro_train_batch_size_per_gpu=3).trainer
    batch, exact = off_policy_batch(tiny_model, 28), spec("policy", tiny_model_path, cfg)
    assert exact.lora is not None
    lora = replace(exact.lora, config=exact.lora.config.model_copy(update={"dropout": 0.5}))
    norms, scores = [], []
    for index, options in enumerate((exact, replace(exact, lora=lora), replace(exact, lora=lora))):
        group = await load_group(ranks, options, policy_objective(cfg))
        probes = [await group.probe(batch) for _ in range(2 if index == 2 else 1)]  # which take no random numbers
        assert probes[0] == probes[-1]
        norms.append([(await group.update(batch)).numbers()["grad_norm"] for _ in range(2)])
        scores.append([(await group.score(batch))["logprobs"] for _ in range(2)])
        assert torch.equal(*scores[-1])
    assert norms[1] == norms[2]
    assert torch.equal(scores[1][0], scores[2][0])
    assert abs(norms[1][0] / norms[0][0] - 1) > 0.02
    await save(group, tmp_path)
    states = [torch.load(tmp_path / f"rng_{rank}.pt", weights_only=True)["torch"] for rank in range(len(ranks))]
    assert len({tuple(state.tolist()) for state in states}) == len(ranks)


async def test_a_continued_adapter_of_a_critic_keeps_its_head(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    def critic(**lora: Any) -> Any:
        model = {"path": str(tiny_model_path), "lora": lora}
        cfg = config(critic={"model": model}, policy={"optimizer_config": {"lr": 1e-2}}).trainer
        return spec("critic", tiny_model_path, cfg), ValueObjective(1e9)

    batch = random_batch(24)
    batch.values, batch.returns = 0.0 * batch.loss_mask, 1.0 * batch.loss_mask
    trained = await load_group([single_rank()], *critic(rank=4))
    await trained.update(batch)
    expected = (await trained.score(batch))["values"]
    assert expected.abs().max() > 1e-3, "the head of a new critic is 0"
    await trained.export(tmp_path)
    for group_ranks in ([single_rank()], ranks):
        continued = await load_group(group_ranks, *critic(lora_path=str(tmp_path)))
        torch.testing.assert_close((await continued.score(batch))["values"], expected, rtol=0, atol=1e-5)


async def test_an_adapter_learns_after_the_reference_was_scored_without_it(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    batches = [random_batch(seed) for seed in range(3)]
    base = await load_policy([single_rank()], tiny_model_path)
    expected = await base.score(batches[0])
    scores = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_policy(group_ranks, tiny_model_path, policy=LORA)
        for batch in batches:
            reference = await group.score(batches[0], adapter=False)
            torch.testing.assert_close(reference["logprobs"], expected["logprobs"], rtol=0, atol=2e-5)
            metrics = (await group.update(batch)).numbers()
        assert metrics["adapter_norm"] > 0
        scores.append(await group.score(batches[0]))
        assert (scores[-1]["logprobs"] - expected["logprobs"]).abs().max() > 1e-2
    torch.testing.assert_close(scores[1]["logprobs"], scores[0]["logprobs"], rtol=0, atol=1e-3)

    resumed = await load_policy([single_rank()], tiny_model_path, policy=LORA)
    await resumed.load_state(await save(group, tmp_path / "policy"))
    await WeightSync(group, {"base": base}, SyncOptions("auto", timeout_s=60))(1)
    for other in (resumed, base):
        after = await other.score(batches[0])
        torch.testing.assert_close(after["logprobs"], scores[1]["logprobs"], rtol=0, atol=2e-5)


async def test_the_base_and_factors_of_an_adapter_make_the_merged_weights(
    ranks: list[ProcessRank], tiny_model_path: Path
) -> None:
    group = await load_policy(ranks, tiny_model_path, policy=LORA)
    sinks, options = [MirroredSink(), MirroredSink()], SyncOptions("auto", timeout_s=30)
    merged = WeightSync(group, {"merged": sinks[0]}, options)
    factors = WeightSync(group, {"factors": sinks[1]}, options, kind="factors")
    for version in range(2):
        await group.update(random_batch(version))
        n_megabytes = [(await sync(version)).numbers()["sync/megabytes"] for sync in (merged, factors)]
        assert sinks[0].tensors.keys() == sinks[1].tensors.keys()
        assert all(torch.equal(sinks[1].tensors[name], tensor) for name, tensor in sinks[0].tensors.items())
    assert sinks[1].kinds == ["base_and_factors", "factors"]
    assert n_megabytes[1] < 0.3 * n_megabytes[0]


async def test_a_float32_adapter_on_a_bfloat16_model(ranks: list[ProcessRank], tiny_model_path: Path) -> None:
    results = []
    for group_ranks in ([single_rank()], ranks):
        group = await load_policy(group_ranks, tiny_model_path, loading={"dtype": torch.bfloat16}, policy=LORA)
        results.append((await group.update(random_batch(1))).numbers())
    for name in ("grad_norm", "adapter_norm"):
        assert results[1][name] == pytest.approx(results[0][name], rel=2e-2)
