"""Checkpoints and exports of ranks: they are the same for every layout and for one process."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from train_kit.models import ROUTER_BIAS, SMALL, create_model, load_on_cpu, save_biased_router
from train_kit.ranks import load_group, new_ranks
from train_kit.strategies import MERGED, PADDING, Strategies, assert_same_weights, layouts, param
from train_kit.workers import policy_objective
from transformers import Qwen2Config

from skyrl_train.algorithms.objectives import ValueObjective
from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.types.specs import Role
from skyrl_train.weight_sync import SyncOptions, WeightSync
from skyrl_train.workers.group import WorkerGroup

SCHEDULE = {"scheduler": "linear", "num_warmup_steps": 4, "lr": 1e-3}


@pytest.mark.parametrize(
    ("first", "others", "trains_adapter"),
    [
        param("fsdp2", ["four, fsdp2"], False),
        param("fsdp2", ["sequence"], False),
        param("tokens", ["fsdp2"], False),
        param("tensor", ["pipeline", "fsdp2"], False),
        param("pipeline", ["tensor"], False),
        param("sequence", ["fsdp2"], True),
        param("four, fsdp2", ["fsdp2", "four, tokens × data"], False, is_nightly=True),
        param("tensor", ["pipeline"], True, is_nightly=True),
        param("pipeline", ["tensor", "context"], True, is_nightly=True),
        param("fsdp2", ["pipeline"], True, is_nightly=True),
        param("context", ["tensor"], False, is_nightly=True),
    ],
)
async def test_a_checkpoint_resumes_in_other_layouts_in_one_process_and_back(
    strategies: Strategies, first: str, others: Sequence[str], trains_adapter: bool
) -> None:
    lora = strategies.adapter("qwen2") | MERGED if trains_adapter else None
    batches = [strategies.batch("qwen2", seed) for seed in range(3)]

    async def resume(layout: str | None, folder: Path) -> Any:
        resumed = await strategies.load("qwen2", layout, lora, optimizer=SCHEDULE)
        await resumed.load_state(folder)
        return resumed

    group = await strategies.load("qwen2", first, lora, optimizer=SCHEDULE)
    await group.update(batches[0])
    folder = await strategies.save(group)
    expected, weights = (await group.update(batches[1])).numbers(), await strategies.weights(group)
    for layout in (*others, None):
        resumed = await resume(layout, folder)
        assert (await resumed.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert_same_weights(await strategies.weights(resumed), weights)
    folder = await strategies.save(resumed)
    expected = (await resumed.update(batches[2])).numbers()
    metrics = (await (await resume(first, folder)).update(batches[2])).numbers()
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("role", ["policy", "critic"])
@layouts("fsdp2", "fsdp2, two copies", nightly=["four, fsdp2, two copies"])
async def test_short_weights_and_moments_resume_exactly_and_in_other_layouts(
    strategies: Strategies, layout: str, role: Role
) -> None:
    """bfloat16 weights, a float32 value head, and moments in 8 bits, of which a rank holds rows."""
    base = strategies.new_folder()
    create_model(Qwen2Config(**SMALL | {"intermediate_size": 520}, pad_token_id=PADDING)).save_pretrained(base)
    section = {
        "model": {"path": str(base), "train_dtype": "bfloat16"},
        "optimizer_config": {"name": "adamw_8bit", "lr": 1e-3},
    }
    batches = [strategies.batch("qwen2", seed) for seed in range(3)]

    async def load(layout: str | None, folder: Path | None = None) -> WorkerGroup:
        settings: dict[str, Any] = {"role": role, "trainer": {"policy": section, "critic": section}}
        objective = ValueObjective(1e9) if role == "critic" else None
        group = await strategies.load(base, layout, objective=objective, **settings)
        if folder is not None:
            await group.load_state(folder)
        return group

    group = await load(layout)
    for batch in batches[:2]:
        metrics = (await group.update(batch)).numbers()
    assert metrics["grad_norm"] > 0
    folder = await strategies.save(group)
    names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    codes = names["optimizer.state.model.model.layers.0.mlp.up_proj.weight.exp_avg_codes"]
    assert (codes.properties.dtype, codes.size) == (torch.uint8, (520, SMALL["hidden_size"]))
    if role == "critic":
        assert names["model.model.score.weight"].properties.dtype == torch.float32
    expected, scores = (await group.update(batches[2])).numbers(), await group.score(batches[0])
    resumed = await load(layout, folder)
    assert (await resumed.update(batches[2])).numbers() == expected
    for name, values in (await resumed.score(batches[0])).items():
        assert torch.equal(values, scores[name])
    single = await load(None, folder)
    assert (await single.update(batches[2])).numbers()["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    folder = await strategies.save(single)
    expected_scores, scores = await single.score(batches[0]), await (await load(layout, folder)).score(batches[0])
    for name, values in scores.items():
        torch.testing.assert_close(values, expected_scores[name], rtol=0.05, atol=0.05)


@layouts("fsdp2", "tensor")
async def test_a_rank_that_cannot_write_fails_the_save_and_the_next_one_resumes_exactly(
    strategies: Strategies, layout: str
) -> None:
    batch, group = strategies.batch("qwen3"), await strategies.load("qwen3", layout)
    broken = strategies.folder / "broken"
    (broken / "rng_1.pt").mkdir(parents=True)
    with pytest.raises(OSError, match=r"the policy could not be written: IsADirectoryError: .*rng_1\.pt"):
        await (await group.save(broken))
    assert not (broken / ".metadata").exists(), "it would be taken for complete"
    await group.update(batch)
    folder = await strategies.save(group)
    expected, weights = (await group.update(batch)).numbers(), await strategies.weights(group)
    resumed = await strategies.load("qwen3", layout)
    await resumed.load_state(folder)
    assert (await resumed.update(batch)).numbers() == expected
    assert_same_weights(await strategies.weights(resumed), weights, atol=0)


@pytest.mark.megatron
async def test_a_checkpoint_that_lacks_a_killed_rank_is_incomplete(strategies: Strategies) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
    async with new_ranks(2, "skyrl_train.distributed.megatron") as ranks:
        group = await load_group(ranks, strategies.spec("qwen3", "tensor"), policy_objective(strategies.config()))
        await group.update(strategies.batch("qwen3"))
        folder, incomplete = await strategies.save(group), strategies.new_folder()
        ranks[1]._process.kill()
        with pytest.raises(Exception, match=r"rank 1 .*ended|could not be written|Connection closed"):
            await asyncio.wait_for((await group.save(incomplete)), 60)
        assert not (incomplete / ".metadata").exists(), "it would be taken for complete"
    await (await strategies.load("qwen3")).load_state(folder)


@pytest.mark.parametrize(
    ("layout", "model", "lora"),
    [
        param("fsdp2", "qwen2", None),  # with tied embeddings
        param("fsdp2", "qwen3", {"rank": 4} | MERGED),
        param("pipeline", "qwen2", None),
        param("fsdp2", "qwen3", None, is_nightly=True),
        param("fsdp2", "qwen2", {"rank": 4} | MERGED, is_nightly=True),
        param("pipeline", "qwen2", {"rank": 4} | MERGED, is_nightly=True),
    ],
)
async def test_a_merged_checkpoint_is_the_model_of_the_ranks(
    strategies: Strategies, layout: str, model: str, lora: dict[str, Any] | None
) -> None:
    group, batch = await strategies.load(model, layout, lora), strategies.batch(model)
    for _ in range(2):
        await group.update(batch)
    saved, merged = await strategies.save(group), strategies.folder / "merged"
    assert merge_checkpoint(saved, merged).logit_gap < 1e-5
    exported = load_file(await strategies.export(group) / "model.safetensors")
    assert_same_weights(load_file(merged / "model.safetensors"), exported, atol=1e-7)
    assert (merged / "lora_adapter/adapter_model.safetensors").exists() == bool(lora)
    expected, logprobs, before = [
        (await each.score(batch))["logprobs"]
        for each in (group, await strategies.load(merged), await strategies.load(model))
    ]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-5)
    assert (before - expected).abs().max() > 1e-3


# -- exports


@layouts("fsdp2", "tensor", "pipeline")
async def test_an_export_has_the_weights_that_were_loaded(strategies: Strategies, layout: str) -> None:
    for model in ("qwen3", "qwen2", "llama"):
        exported = await strategies.weights(await strategies.load(model, layout))
        assert_same_weights(exported, load_on_cpu(strategies.path(model)).state_dict(), atol=0)


async def test_an_export_has_the_buffers_of_the_model(strategies: Strategies) -> None:
    base = save_biased_router(strategies.new_folder())
    folder = await strategies.export(await strategies.load(base, "fsdp2"))
    expected, exported = (load_file(path / "model.safetensors") for path in (base, folder))
    assert expected.keys() == exported.keys()
    assert torch.equal(exported[ROUTER_BIAS], expected[ROUTER_BIAS])


async def test_no_rank_waits_for_the_disk_of_an_export(strategies: Strategies, tmp_path: Path) -> None:
    await strategies.load("qwen3", "fsdp2")
    os.mkfifo(tmp_path / "config.json")
    first, *others = (
        asyncio.create_task(rank.call("policy", "export", tmp_path)) for rank in strategies.ranks("fsdp2")
    )
    try:
        assert await asyncio.wait_for(asyncio.gather(*others), 60) == [None] * len(others)
        assert not first.done()
    finally:
        await asyncio.to_thread((tmp_path / "config.json").read_bytes)  # lets the first rank open the pipe
        assert await first is None


@pytest.mark.parametrize("lora", [None, {"rank": 4} | MERGED, {"rank": 4}], ids=str)
async def test_a_disk_that_refuses_an_export_leaves_the_group_usable(
    strategies: Strategies, lora: dict[str, Any] | None
) -> None:
    group, folder = await strategies.load("qwen3", "fsdp2", lora), strategies.new_folder()
    for name in ("config.json", "adapter_config.json"):
        (folder / name).mkdir()
    with pytest.raises(OSError, match=r"the policy could not be written: .*config\.json"):
        await group.export(folder)
    await strategies.export(group)
    await group.update(strategies.batch("qwen3"))


# -- weight syncs


@layouts("fsdp2", "tensor", "pipeline", nightly=["four, fsdp2", "context"])
async def test_weights_are_sent_to_and_received_by_other_groups(strategies: Strategies, layout: str) -> None:
    batch, options = strategies.batch("qwen2"), SyncOptions("gloo", chunk_bytes=5_000, timeout_s=60)
    group, other = await strategies.load("qwen2", layout), await strategies.load("qwen2")
    for sender, receiver in ((group, other), (other, group)):
        before = (await receiver.score(batch))["logprobs"]
        await sender.update(batch)
        await WeightSync(sender, {"receiver": receiver}, options)(1)
        expected, received = [(await each.score(batch))["logprobs"] for each in (sender, receiver)]
        assert not torch.equal(expected, before)
        torch.testing.assert_close(received, expected, rtol=0, atol=2e-5)
