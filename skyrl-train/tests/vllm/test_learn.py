"""Catch is learned with two FSDP2 ranks and vLLM, each on devices of its own, as it is in one process."""

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

import skyrl_gym
from examples.catch.catch_dataset import CatchDataset, write_dataset
from examples.catch.main_catch import register_catch
from examples.catch.recipe import TRAIN_METRIC, CatchRun
from examples.catch.warm_start import play_at_random
from examples.tiny_model import make_tiny_model
from skyrl_train.dataset.files import read_rows

N_STEPS = 20
SETTINGS = (
    "trainer.policy.optimizer_config.lr=2e-3",
    "trainer.policy.optimizer_config.scheduler=constant",
    "trainer.policy.optimizer_config.num_warmup_steps=0",
    "trainer.algorithm.use_kl_loss=false",
    "generator.n_samples_per_prompt=8",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.logger=jsonl",
)
CLUSTER = (
    "generator.backend=vllm",
    "trainer.placement.colocate_all=false",
    "trainer.placement.policy_num_gpus_per_node=2",
)


@pytest.mark.timeout(1800)
def test_a_disaggregated_run_learns_as_fast_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    inline = CatchRun(tmp_path, "shaped", 1, N_STEPS, "inline", SETTINGS)
    cluster = CatchRun(tmp_path, "shaped", 1, N_STEPS, "cluster", (*SETTINGS, *CLUSTER))
    write_dataset(CatchDataset(grid_w=3, grid_h=3, max_turns=2), inline.data_dir)
    games = play_at_random(read_rows(str(inline.data_dir / "train.parquet")), 1000, seed=1)
    make_tiny_model(games, inline.model_dir, 1, n_steps=60, head_dim=32)  # vLLM on a CPU needs heads of 32
    register_catch()
    try:
        inline.train()
        cluster.train()
    finally:
        ray.shutdown()
        nodes.shutdown()
        skyrl_gym.envs.deregister("catch")
    expected, found = ([row[TRAIN_METRIC] for row in run.metrics() if TRAIN_METRIC in row] for run in (inline, cluster))
    assert len(found) == N_STEPS
    assert found[0] == expected[0] < 0.5
    assert sum(found[-5:]) / 5 > 0.9
    assert found[:8] == pytest.approx(expected[:8], abs=0.1)  # rounding adds up later
    assert sum(found) / N_STEPS == pytest.approx(sum(expected) / N_STEPS, abs=0.05)
