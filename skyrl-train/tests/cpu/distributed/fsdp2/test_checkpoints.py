"""FSDP over gloo ranks: checkpoints and exports are interchangeable with those of one process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_kit.batches import random_batch
from train_kit.models import ROUTER_BIAS, load_on_cpu, save_biased_router
from train_kit.ranks import SharedRanks, load_policy, save, single_rank
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.launch.process import ProcessRank
from skyrl_train.weight_sync import SyncOptions, WeightSync

SCHEDULE = {"optimizer_config": {"scheduler": "linear", "num_warmup_steps": 2, "lr": 1e-4}}


async def test_a_checkpoint_of_several_ranks_resumes_on_one_on_others_and_back(
    ranks: list[ProcessRank], shared_ranks: SharedRanks, tiny_model_path: Path, tmp_path: Path
) -> None:
    batches = [random_batch(seed) for seed in range(3)]
    group = await load_policy(ranks, tiny_model_path, policy=SCHEDULE)
    await group.update(batches[0])
    folder = await save(group, tmp_path / "sharded")
    expected = (await group.update(batches[1])).numbers()

    async def resume(others: Any) -> Any:
        resumed = await load_policy(others, tiny_model_path, policy=SCHEDULE)
        await resumed.load_state(folder)
        return resumed

    with shared_ranks.borrow({2: 4, 4: 2}[len(ranks)]) as others:
        metrics = (await (await resume(others)).update(batches[1])).numbers()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
    single = await resume([single_rank()])
    assert (await single.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    folder = await save(single, tmp_path / "single")
    expected = (await single.update(batches[2])).numbers()
    metrics = (await (await resume(ranks)).update(batches[2])).numbers()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


async def test_a_rank_that_cannot_write_fails_the_save_and_training_continues(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    batch, group = random_batch(1), await load_policy(ranks, tiny_model_path)
    (tmp_path / "broken/rng_1.pt").mkdir(parents=True)
    with pytest.raises(OSError, match=r"the policy could not be written: IsADirectoryError: .*rng_1\.pt"):
        await save(group, tmp_path / "broken")
    assert not (tmp_path / "broken/.metadata").exists(), "it would be taken for complete"
    await group.update(batch)
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batch)).numbers()
    await group.load_state(folder)
    assert (await group.update(batch)).numbers() == expected


async def test_an_export_is_a_plain_hugging_face_folder(
    ranks: list[ProcessRank], tiny_model_path: Path, tiny_model: PreTrainedModel, tmp_path: Path
) -> None:
    await (await load_policy(ranks, tiny_model_path)).export(tmp_path)
    exported = load_on_cpu(tmp_path).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in tiny_model.state_dict().items())


async def test_an_export_has_the_buffers_of_the_model(ranks: list[ProcessRank], tmp_path: Path) -> None:
    group = await load_policy(ranks, save_biased_router(tmp_path / "base"))
    await group.export(tmp_path / "export")
    expected, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "export"))
    assert expected.keys() == exported.keys()
    assert torch.equal(exported[ROUTER_BIAS], expected[ROUTER_BIAS])


async def test_no_rank_waits_for_the_disk_of_an_export(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path
) -> None:
    await load_policy(ranks, tiny_model_path)
    os.mkfifo(tmp_path / "config.json")
    first, *others = (asyncio.create_task(rank.call("export", tmp_path)) for rank in ranks)
    try:
        assert await asyncio.wait_for(asyncio.gather(*others), 60) == [None] * len(others)
        assert not first.done()
    finally:
        await asyncio.to_thread((tmp_path / "config.json").read_bytes)  # lets the first rank open the pipe
        assert await first is None


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "merge_on_export": True}, {"rank": 4}], ids=str)
async def test_a_disk_that_refuses_an_export_leaves_the_group_usable(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    group = await load_policy(ranks, tiny_model_path, policy={"model": {"lora": lora}})
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=r"the policy could not be written: .*config\.json"):
        await group.export(tmp_path)
    await group.export(tmp_path / "elsewhere")
    await group.update(random_batch(1))


async def test_weights_are_synchronized_from_sharded_ranks_to_another_group(
    ranks: list[ProcessRank], tiny_model_path: Path
) -> None:
    group, other = await load_policy(ranks, tiny_model_path), await load_policy([single_rank()], tiny_model_path)
    batch = random_batch(1)
    await group.update(batch)
    before = await other.score(batch)
    await WeightSync(group, {"other": other}, SyncOptions("gloo", chunk_bytes=50_000, timeout_s=60))(1)
    after, sharded = await other.score(batch), await group.score(batch)
    assert not torch.equal(before["logprobs"], after["logprobs"])
    torch.testing.assert_close(after["logprobs"], sharded["logprobs"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("lora", "is_tied"),
    [
        ({}, True),
        ({"rank": 4, "merge_on_export": True}, False),
        pytest.param({}, False, marks=pytest.mark.nightly),
        pytest.param({"rank": 4, "merge_on_export": True}, True, marks=pytest.mark.nightly),
    ],
)
async def test_a_merged_checkpoint_is_the_model_of_the_ranks(
    ranks: list[ProcessRank], tiny_model_path: Path, tmp_path: Path, lora: dict[str, Any], is_tied: bool
) -> None:
    base = tmp_path / "base"
    settings = AutoConfig.from_pretrained(tiny_model_path, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(settings).save_pretrained(base)
    policy = {"model": {"path": str(base), "lora": lora}, "optimizer_config": {"lr": 1e-3}}
    group = await load_policy(ranks, base, policy=policy)
    for seed in range(2):
        await group.update(random_batch(seed))
    await save(group, tmp_path / "policy")
    await group.export(tmp_path / "export")
    report = merge_checkpoint(tmp_path, tmp_path / "merged")
    assert report.logit_gap < 1e-5
    exported, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "merged"))
    assert exported.keys() == merged.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(merged[name], tensor, rtol=0, atol=1e-7, msg=name)
    assert (tmp_path / "merged/lora_adapter/adapter_model.safetensors").exists() == bool(lora)
    assert ("lm_head.weight" in merged) != is_tied
    batch = random_batch(2)
    whole, original = [await load_policy([single_rank()], path) for path in (tmp_path / "merged", base)]
    expected, logprobs, before = [(await one.score(batch))["logprobs"] for one in (group, whole, original)]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-3
