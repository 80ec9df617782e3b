"""Processes of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed import FSDP2Strategy
from skyrl_train.launch.rank_host import COLLECTIVE_TIMEOUT, RankHost
from skyrl_train.types.specs import World


def write_timeouts(rank: int, folder: Path) -> None:
    """Write the time that the collectives of a rank in 2 × 2 groups may take, for each of its groups."""
    from skyrl_train.distributed.megatron import MegatronStrategy

    host = RankHost(World(rank, 4), f"file://{folder / 'store'}", 1)
    megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    divided = MegatronStrategy(host._world, megatron, COLLECTIVE_TIMEOUT)
    copied = FSDP2Strategy(host._world, COLLECTIVE_TIMEOUT)._mesh(2)
    found = divided._groups
    groups = [*copied.get_all_groups(), found.pp, found.dp, found.tp, found.mp, divided._ends]
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    (folder / f"rank_{rank}").write_text(" ".join(str(timeout.total_seconds()) for timeout in timeouts))
    host.close()


@pytest.mark.megatron
def test_all_groups_of_ranks_have_the_same_timeout(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
    mp.spawn(write_timeouts, (tmp_path,), nprocs=4)
    for rank in range(4):
        timeouts = (tmp_path / f"rank_{rank}").read_text().split()
        assert timeouts == [str(COLLECTIVE_TIMEOUT.total_seconds())] * 7
