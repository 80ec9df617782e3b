"""Megatron-Core over gloo ranks: steps equal those of one process, in every layout."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from train_kit.batches import random_batch
from train_kit.megatron import (
    DATA,
    N_TOKENS,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    batch_for,
    compare,
    exported_tensors,
    layouts,
    layouts_and_models,
    load_model_group,
    model_spec,
)
from train_kit.models import load_on_cpu
from train_kit.ranks import SharedRanks, save, single_rank, train_with_moves

from skyrl_train.algorithms.objectives import PreferenceObjective
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.launch.process import ProcessRank
from skyrl_train.weight_sync import SyncOptions, WeightSync

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = pytest.mark.megatron


# context parallelism: test_context.py has rows of any length
@layouts_and_models([("tensor", "qwen3"), ("sequence", "qwen2"), ("pipeline", "llama"), ("data", "qwen3")])
async def test_steps_equal_those_of_one_process(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, model: str, megatron: MegatronConfig
) -> None:
    await compare(two_ranks, paths[model], megatron, tmp_path)


@layouts(["tensor", "pipeline"], nightly=["context"])
async def test_gradient_checkpointing_changes_nothing(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    await compare(two_ranks, paths["qwen2"], megatron, tmp_path, gradient_checkpointing=True)


@pytest.mark.nightly
@pytest.mark.parametrize("trains_adapter", [False, True])
@pytest.mark.parametrize(
    ("model", "megatron"),
    [
        pytest.param("qwen2", TENSOR, id="tensor × data"),
        pytest.param(
            "qwen2",
            SEQUENCE.model_copy(update={"pipeline_model_parallel_size": 2}),
            id="sequence × pipeline",
        ),
        pytest.param("qwen3", PIPELINE, id="pipeline × data"),
    ],
)
async def test_layouts_of_four_ranks(
    shared_ranks: SharedRanks,
    paths: dict[str, Path],
    adapters: dict[str, Path],
    tmp_path: Path,
    model: str,
    megatron: MegatronConfig,
    trains_adapter: bool,
) -> None:
    lora = {"lora_path": str(adapters[model]), "merge_on_export": True} if trains_adapter else None
    with shared_ranks.borrow(4) as ranks:
        await compare(ranks, paths[model], megatron, tmp_path, lora)


@layouts(["sequence", "pipeline"])
async def test_a_model_that_moves_between_calls_trains_bit_for_bit_alike(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    path = paths["qwen2"]  # with tied embeddings
    batches = [batch_for(path, seed) for seed in range(3)]
    stationary = await load_model_group(two_ranks, model_spec(path, megatron))
    expected = [(await stationary.update(batch)).numbers() for batch in batches]
    weights = await exported_tensors(stationary, tmp_path / "stationary")
    moved = await load_model_group(two_ranks, model_spec(path, megatron))
    assert await train_with_moves(moved, batches) == expected
    for name, tensor in (await exported_tensors(moved, tmp_path / "moved")).items():
        assert torch.equal(tensor, weights[name]), name


async def test_a_loss_of_pairs(two_ranks: list[ProcessRank], paths: dict[str, Path]) -> None:
    batch = random_batch(1, n_prompts=4, n_samples=2, n_tokens=N_TOKENS)
    batch.ref_logprobs = torch.zeros_like(batch.loss_mask)
    batch.rewards = torch.zeros_like(batch.loss_mask)
    batch.rewards[::2, -1] = 1.0
    objective, metrics = PreferenceObjective(0.1, 0.0, "sigmoid"), []
    for ranks, megatron in (([single_rank()], None), (two_ranks, PIPELINE)):
        group = await load_model_group(ranks, model_spec(paths["qwen3"], megatron), objective)
        metrics.append((await group.update(batch)).numbers())
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


async def test_rows_without_trained_tokens_change_nothing(two_ranks: list[ProcessRank], paths: dict[str, Path]) -> None:
    batch = copy.deepcopy(batch_for(paths["qwen2"], 1))
    batch.loss_mask[1:] = 0
    norms = []
    for ranks, megatron in (([single_rank()], None), (two_ranks, DATA), (two_ranks, PIPELINE)):
        group = await load_model_group(ranks, model_spec(paths["qwen2"], megatron))
        norms.append((await group.update(batch)).numbers()["grad_norm"])
    assert norms[1:] == pytest.approx([norms[0], norms[0]], rel=1e-4)
    batch.loss_mask.zero_()
    metrics = (await group.update(batch)).numbers()
    assert metrics["skipped_updates"] == 0
    assert "grad_norm" not in metrics, "no rank has a gradient"


async def test_an_infinite_gradient_skips_the_step_on_all_ranks(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    batch = copy.deepcopy(batch_for(paths["qwen2"], 1))
    group = await load_model_group(two_ranks, model_spec(paths["qwen2"], PIPELINE))
    before = await exported_tensors(group, tmp_path / "before")
    assert batch.advantages is not None
    batch.advantages[0] = torch.inf
    assert (await group.update(batch)).numbers()["skipped_updates"] == 1
    after = await exported_tensors(group, tmp_path / "after")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert await group.is_finite()


@layouts(["tensor", "pipeline"])
async def test_weights_loaded_in_bfloat16_are_trained_in_float32(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, megatron: MegatronConfig
) -> None:
    path, results = paths["qwen2"], []
    rounded = {"dtype": torch.bfloat16}
    for name, ranks, layout in (("single", [single_rank()], None), ("divided", two_ranks, megatron)):
        group = await load_model_group(ranks, model_spec(path, layout, **rounded))
        for _ in range(3):
            await group.update(batch_for(path, 1))
        assert {tensor.dtype for tensor in await group.tensor_specs()} == {torch.bfloat16}
        reader = single_rank()
        await (await load_model_group([reader], model_spec(path))).load_state(await save(group, tmp_path / name))
        weights = dict(reader.worker.module.hf_model.named_parameters())
        exported = await exported_tensors(group, tmp_path / f"{name}_export")
        assert all(torch.equal(exported[key], value.bfloat16().float()) for key, value in weights.items())
        results.append(weights)
    for key, start in load_on_cpu(path, **rounded).named_parameters():
        torch.testing.assert_close(results[1][key], results[0][key], rtol=0, atol=1e-6, msg=key)
        assert not torch.equal(results[0][key], results[0][key].bfloat16()), f"{key} was rounded"
        assert (results[0][key] - start).abs().max() < 1e-3, f"{key} did not start from the rounded weights"


@layouts(["tensor", "pipeline"], nightly=["context"])
async def test_weights_are_sent_to_and_received_by_other_groups(
    two_ranks: list[ProcessRank], paths: dict[str, Path], megatron: MegatronConfig
) -> None:
    path, options = paths["qwen2"], SyncOptions("broadcast", chunk_bytes=5_000, timeout_s=60)
    batch = batch_for(path, 1)
    group = await load_model_group(two_ranks, model_spec(path, megatron))
    other = await load_model_group([single_rank()], model_spec(path))
    for sender, receiver in ((group, other), (other, group)):
        before = (await receiver.score(batch))["logprobs"]
        for _ in range(2):  # the learning rate starts at 0
            await sender.update(batch)
        await WeightSync(sender, {"receiver": receiver}, options)(1)
        expected, received = [(await each.score(batch))["logprobs"] for each in (sender, receiver)]
        assert not torch.equal(expected, before)
        torch.testing.assert_close(received, expected, rtol=0, atol=2e-5)
