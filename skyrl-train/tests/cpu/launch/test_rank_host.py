import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d
from train_kit.ranks import spec
from train_kit.sysfs import MAX_CORE, imitate_gpus, write_sysfs
from train_kit.workers import config

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.distributed import FSDP2Strategy
from skyrl_train.launch.process import COLLECTIVE_TIMEOUT, RankHost
from skyrl_train.types.specs import World

pytestmark = pytest.mark.usefixtures("forked_processes")


def write_cores(_: int, folder: Path, device: str) -> None:
    imitate_gpus(folder)
    RankHost(World(device=device), "env://", 1)
    (folder / "cores").write_text(str(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("device", "cores"),
    [("cuda", {MAX_CORE}), ("cuda:0", {MAX_CORE}), ("cuda:1", os.sched_getaffinity(0))],
    ids=["the one GPU of an actor", "the GPU of node 1", "a GPU of no node"],
)
def test_a_rank_runs_on_the_cores_next_to_its_gpu(tmp_path: Path, device: str, cores: set[int]) -> None:
    write_sysfs(tmp_path, 1, str(MAX_CORE))
    mp.spawn(write_cores, (tmp_path, device))
    assert (tmp_path / "cores").read_text() == str(cores)


def write_timeouts(rank: int, folder: Path) -> None:
    """Write the time that the collectives of a rank in 2 × 2 groups may take, for each of its groups."""
    from skyrl_train.distributed.megatron import MegatronStrategy

    host = RankHost(World(rank, 4), f"file://{folder / 'store'}", 1)
    megatron = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    divided = MegatronStrategy(host._world, megatron, COLLECTIVE_TIMEOUT)
    copied = FSDP2Strategy(host._world, COLLECTIVE_TIMEOUT)._mesh(2)
    found = divided._groups
    groups = [*copied.get_all_groups(), found.pp, found.dp, found.cp, found.tp]
    groups += [found.mp, found.dp_cp, divided._embedding_group]
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    (folder / f"rank_{rank}").write_text(" ".join(str(timeout.total_seconds()) for timeout in timeouts))
    host.close()


@pytest.mark.nightly
@pytest.mark.megatron
def test_all_groups_of_ranks_have_the_same_timeout(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, the extra mcore of skyrl-train")
    mp.spawn(write_timeouts, (tmp_path,), nprocs=4)
    for rank in range(4):
        timeouts = (tmp_path / f"rank_{rank}").read_text().split()
        assert timeouts == [str(COLLECTIVE_TIMEOUT.total_seconds())] * 9


def save_on_a_stalled_disk(rank: int, folder: Path, path: Path) -> None:
    """Save while the disk of rank 1 responds after torch's timeout for new groups, then save again."""
    distributed_c10d.default_pg_timeout = timedelta(seconds=3)
    host = RankHost(World(rank, 2), f"file://{folder / 'store'}", 1)
    results = [host.answer("policy", "load", (spec("policy", path, config().trainer), None))]
    for name in ("stalled", "next"):
        results.append(host.answer("policy", "begin_save", (folder / name,)))
        if name == "stalled" and rank == 1:
            time.sleep(5)
            (folder / name / "rng_1.pt").read_bytes()  # lets the writer open the pipe
        results.append(host.answer("policy", "finish_save", ()))
    assert results == [(True, None)] * 5
    host.close()


def test_ranks_wait_for_a_stalled_disk_and_save_again(tmp_path: Path, tiny_model_path: Path) -> None:
    (tmp_path / "stalled").mkdir()
    os.mkfifo(tmp_path / "stalled/rng_1.pt")
    mp.spawn(save_on_a_stalled_disk, (tmp_path, tiny_model_path), nprocs=2)
    assert all((tmp_path / name / ".metadata").exists() for name in ("stalled", "next"))
