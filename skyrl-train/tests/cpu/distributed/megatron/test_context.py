"""Context parallelism of Megatron-Core: ranks divide the tokens of each row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from train_kit.batches import as_batch, random_row, score_off_policy
from train_kit.megatron import CONTEXT, N_TOKENS, batch_for, compare, load_model_group, model_spec
from train_kit.models import load_on_cpu
from train_kit.oracle import OracleTrajectory
from train_kit.ranks import SharedRanks, single_rank

from skyrl_train.launch.process import ProcessRank
from skyrl_train.types import TrainingBatch

pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
pytestmark = pytest.mark.megatron

Lengths = Sequence[tuple[int, int, int]]
"""Tokens of each row's prompt, sampled tokens, and tokens of its observation."""

UNEVEN_ROWS = ((1, 1, 0), (3, 90, 0), (2, 5, 2), (7, 13, 0), (40, 1, 0))
ROWS_OF_FIRST_RANK = ((30, 2, 0), (29, 3, 0))  # all predictions are in the last of four chunks
ROWS_OF_SECOND_RANK = ((9, 3, 12), (8, 4, 11))  # all predictions are in the second one


@cache
def batch_of(path: Path, lengths: Lengths) -> TrainingBatch:
    """Return a batch of random rows of these lengths."""
    rng = random.Random(0)
    rows = [random_row(rng, *row, n_tokens=N_TOKENS) for row in lengths]
    return score_off_policy(load_on_cpu(path), as_batch([OracleTrajectory("p0", [row]) for row in rows]))


async def test_rows_of_any_length(two_ranks: list[ProcessRank], paths: dict[str, Path], tmp_path: Path) -> None:
    path = paths["qwen2"]
    batches = [batch_of(path, rows) for rows in (UNEVEN_ROWS, ROWS_OF_FIRST_RANK, ROWS_OF_SECOND_RANK)]
    await compare(two_ranks, path, CONTEXT, tmp_path, batches=batches)


@pytest.mark.parametrize(
    ("model", "others"),
    [
        pytest.param("qwen2", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, id="sequence"),
        *(
            pytest.param(model, others, id=name, marks=pytest.mark.nightly)
            for name, model, others in (
                ("tensor", "qwen3", {"tensor_model_parallel_size": 2}),
                ("pipeline", "qwen2", {"pipeline_model_parallel_size": 2}),
                ("data", "qwen2", {}),
                ("context", "llama", {"context_parallel_size": 4}),
            )
        ),
    ],
)
async def test_other_kinds_of_parallelism_at_once(
    shared_ranks: SharedRanks, paths: dict[str, Path], tmp_path: Path, model: str, others: dict[str, int]
) -> None:
    path = paths[model]
    batches = [batch_of(path, UNEVEN_ROWS), batch_of(path, ROWS_OF_SECOND_RANK), batch_for(path, 0)]
    with shared_ranks.borrow(4) as ranks:
        await compare(ranks, path, CONTEXT.model_copy(update=others), tmp_path, batches=batches)


async def test_ranks_count_their_own_tokens(two_ranks: list[ProcessRank], paths: dict[str, Path]) -> None:
    batch = batch_for(paths["qwen2"], 1)
    limited = replace(model_spec(paths["qwen2"]), max_rows_train=None, max_tokens_per_micro_batch=40)
    divided = await load_model_group(two_ranks, replace(limited, megatron=CONTEXT))
    whole = await load_model_group([single_rank()], replace(limited, max_tokens_per_micro_batch=80))
    whole._shares_prefixes = False  # which Megatron-Core does not
    ((shard,), _), ((expected,), _) = (group._split(batch, None) for group in (divided, whole))
    assert shard.micro_batches == expected.micro_batches
    assert 1 < len(shard.micro_batches) < len(batch)
