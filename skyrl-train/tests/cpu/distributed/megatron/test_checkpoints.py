"""Checkpoints of Megatron-Core: they resume in other layouts, with FSDP2, and in one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from train_kit.megatron import (
    CONTEXT,
    MERGED,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    batch_for,
    exported_tensors,
    load_model_group,
    model_spec,
)
from train_kit.models import load_on_cpu
from train_kit.ranks import new_ranks, save, single_rank

from skyrl_train.checkpoint.merge import merge_checkpoint
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.launch.process import ProcessRank

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("first", "others", "trains_adapter"),
    [
        (TENSOR, [PIPELINE, None], False),
        (PIPELINE, [TENSOR], False),
        (None, [SEQUENCE], False),
        (SEQUENCE, [None], True),
        pytest.param(TENSOR, [PIPELINE], True, marks=pytest.mark.nightly),
        pytest.param(PIPELINE, [TENSOR, CONTEXT], True, marks=pytest.mark.nightly),
        pytest.param(None, [PIPELINE], True, marks=pytest.mark.nightly),
        pytest.param(CONTEXT, [TENSOR], False, marks=pytest.mark.nightly),
    ],
)
async def test_a_checkpoint_resumes_in_another_layout_and_in_one_process(
    two_ranks: list[ProcessRank],
    paths: dict[str, Path],
    adapters: dict[str, Path],
    tmp_path: Path,
    first: MegatronConfig | None,
    others: list[MegatronConfig | None],
    trains_adapter: bool,
) -> None:
    path = paths["qwen2"]  # with tied embeddings
    lora = {"lora_path": str(adapters["qwen2"])} | MERGED if trains_adapter else None
    batches = [batch_for(path, seed) for seed in range(2)]
    group = await load_model_group(two_ranks, model_spec(path, first, lora))  # None: FSDP2
    await group.update(batches[0])
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batches[1])).numbers()
    weights = await exported_tensors(group, tmp_path / "expected")
    for ranks, megatron in (*((two_ranks, layout) for layout in others), ([single_rank()], None)):
        resumed = await load_model_group(ranks, model_spec(path, megatron, lora))
        await resumed.load_state(folder)
        assert (await resumed.update(batches[1])).numbers() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, tensor in (await exported_tensors(resumed, tmp_path / "resumed")).items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=name)


async def test_the_same_layout_resumes_exactly(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path
) -> None:
    path = paths["qwen3"]
    group = await load_model_group(two_ranks, model_spec(path, TENSOR))
    await group.update(batch_for(path, 0))
    folder = await save(group, tmp_path / "policy")
    expected = (await group.update(batch_for(path, 1))).numbers()
    weights = await exported_tensors(group, tmp_path / "expected")
    resumed = await load_model_group(two_ranks, model_spec(path, TENSOR))
    await resumed.load_state(folder)
    assert (await resumed.update(batch_for(path, 1))).numbers() == expected
    again = await exported_tensors(resumed, tmp_path / "again")
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


async def test_a_checkpoint_that_lacks_a_killed_rank_is_incomplete(paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["qwen3"]
    async with new_ranks(2, "skyrl_train.distributed.megatron") as ranks:
        group = await load_model_group(ranks, model_spec(path, TENSOR))
        await group.update(batch_for(path, 0))
        folder = await save(group, tmp_path / "first")
        ranks[1]._process.kill()
        with pytest.raises(Exception, match=r"rank 1 .*ended|could not be written|Connection closed"):
            await asyncio.wait_for(save(group, tmp_path / "second"), 60)
        assert not (tmp_path / "second/.metadata").exists(), "it would be taken for complete"
    await (await load_model_group([single_rank()], model_spec(path))).load_state(folder)


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 4} | MERGED, marks=pytest.mark.nightly)])
async def test_a_checkpoint_is_merged_into_a_hugging_face_folder(
    two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    path = paths["qwen2"]
    group = await load_model_group(two_ranks, model_spec(path, PIPELINE, lora))
    for _ in range(2):  # the learning rate starts at 0
        await group.update(batch_for(path, 0))
    merge_checkpoint(await save(group, tmp_path / "policy"), tmp_path / "merged")
    exported = await exported_tensors(group, tmp_path / "export")
    merged = load_on_cpu(tmp_path / "merged").state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in exported.items())
