"""Weights from a sharded policy to an engine in another process, and a sync that is broken on purpose."""

import sys
from collections.abc import Callable

import pytest
from ray import cloudpickle
from ray.cluster_utils import Cluster
from train_kit.processes import kill_descendant
from train_kit.runs import AtStepEnd, Run, assert_close_runs, run_of, train_with
from transformers import PreTrainedModel

from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import ConfigError, SyncError
from skyrl_train.inference_engines.base import InferenceEngine
from skyrl_train.inference_engines.hf import PackedEngine
from skyrl_train.weight_sync import Receipt, SyncPlan

pytestmark = pytest.mark.timeout(600)


def test_transports_and_changes_train_alike(start_cluster: Callable[..., Cluster], train: Callable[..., Run]) -> None:
    start_cluster(2)
    refreshing = "trainer.update_ref_every_epoch=true"  # after steps 2 and 4
    inline = train("inline", refreshing)
    memory = train(
        "memory", refreshing, "trainer.placement.policy_num_gpus_per_node=2", "generator.weight_sync_backend=shm"
    )
    gloo = train(
        "gloo",
        refreshing,
        "trainer.placement.launcher=ray",
        "generator.weight_sync_backend=gloo",
        "generator.weight_sync_delta=true",
    )
    for run in (memory, gloo):
        assert_close_runs(run, inline)
        assert all(step["sync/verified_copies"] == 1 for step in run.metrics)
        assert all(step["sync/logprob_gap"] < 1e-5 for step in run.metrics)
    assert gloo.metrics[1]["sync/megabytes"] <= 1.01 * memory.metrics[1]["sync/megabytes"]


class CarelessEngine(PackedEngine):
    """An engine that changes a weight after each sync but the first."""

    async def _load_weights(self, plan: SyncPlan) -> Receipt:
        receipt = await super()._load_weights(plan)
        if plan.version > 0:
            self._model.lm_head.weight.data.mul_(1.5)
        return receipt


class Careless(RLExperiment):
    """A run with a `CarelessEngine`."""

    def get_engine(self, model: PreTrainedModel) -> InferenceEngine:
        return CarelessEngine(
            model, self.tokenizer, max_num_seqs=64, max_num_batched_tokens=1024, max_cache_bytes=1 << 26
        )


def test_a_sync_that_is_broken_on_purpose_ends_the_run(
    start_cluster: Callable[..., Cluster], five_steps: list[str]
) -> None:
    start_cluster(1)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    overrides = [*five_steps, "trainer.placement.launcher=ray"]
    with pytest.raises(SyncError, match="weight sync 1 failed: the engine does not compute with the policy's weights"):
        Careless(parse_cli(overrides)).run()
    assert run_of(overrides).steps == [0]


def test_a_timeout_that_ranks_would_not_wait_for_is_refused(
    start_cluster: Callable[..., Cluster], five_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_WORKER_NCCL_TIMEOUT_IN_S", "60")  # of the cluster's processes, not of this one
    start_cluster(2)
    ranks = "trainer.placement.policy_num_gpus_per_node=2"
    cfg = parse_cli([*five_steps, ranks, "generator.weight_sync_timeout_seconds=31"])
    with pytest.raises(
        ConfigError,
        match=r"weight_sync_timeout_seconds=31 must be at least 30 s less than SKYRL_WORKER_NCCL_TIMEOUT_IN_S=60.*"
        r"SKYRL_WORKER_NCCL_TIMEOUT_IN_S=61 where",
    ):
        RLExperiment(cfg).run()


def test_two_engines_train_like_one_process_and_a_killed_one_is_replaced(
    start_cluster: Callable[..., Cluster],
    five_steps: list[str],
    train: Callable[..., Run],
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_cluster(1, 1)
    inline = train("inline")
    settings = [
        "trainer.placement.policy_num_nodes=2",
        "generator.num_inference_engines=2",
        "generator.weight_sync_backend=nccl",
    ]
    kill = AtStepEnd(lambda run, step: step == 2 and kill_descendant("EngineActor"))
    two = train_with(*five_steps, "trainer.run_name=two", *settings, first=[kill])
    assert_close_runs(two, inline)
    assert "was lost and is replaced" in caplog.text
    assert "generator.weight_sync_backend=nccl: weights travel through shared memory, and gloo" in caplog.text
    assert all(step["sync/verified_copies"] == 2 for step in two.metrics)
