"""Runs on a Ray cluster equal those of one process, and end with their cause."""

import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from train_kit import runs
from train_kit.processes import kill_descendant
from train_kit.runs import AtStepEnd, Run, assert_close_runs, expect_error, read_lines, run_of, train_with

from skyrl_train.launch.ray.placement import DeviceRequest, Reservation

pytestmark = pytest.mark.timeout(600)  # each process imports PyTorch, and a test has up to 12

PPO = ["trainer.algorithm.advantage_estimator=gae"]
LORA = ["trainer.policy.model.lora.rank=4", "trainer.policy.model.lora.merge_on_export=true"]


def test_one_and_two_ranks_train_like_one_process(
    start_cluster: Callable[..., Cluster], train: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    start_cluster(1, 1)  # two nodes, each with a single CPU
    inline = train("inline")
    assert_close_runs(train("one", "trainer.placement.launcher=ray"), inline)
    assert_close_runs(train("two", "trainer.placement.policy_num_nodes=2"), inline)
    assert "Reserved 2 × 1 CPU for policy, ref, engine" in caplog.text
    assert max(row["policy/rollout_train_logprobs_abs_diff_mean"] for row in inline.metrics[1:]) < 1e-5


@pytest.mark.megatron
@pytest.mark.parametrize("lora", [[], pytest.param(LORA, marks=pytest.mark.nightly)], ids=["full", "lora"])
def test_megatron_trains_like_one_process(
    start_cluster: Callable[..., Cluster], train: Callable[..., Run], lora: list[str]
) -> None:
    pytest.importorskip("megatron.core")
    start_cluster(2)
    megatron = ["trainer.strategy=megatron", "trainer.placement.policy_num_gpus_per_node=2"]
    tensor, pipeline = (f"megatron_config.{kind}_model_parallel_size=2" for kind in ("tensor", "pipeline"))
    ranks = train("ranks", *megatron, f"trainer.policy.{tensor}", f"trainer.ref.{pipeline}", *lora)
    assert_close_runs(ranks, train("inline", *lora))


def test_a_critic_on_its_own_ranks(
    start_cluster: Callable[..., Cluster],
    train: Callable[..., Run],
    tiny_model_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_cluster(4)
    ppo = [*PPO, f"trainer.critic.model.path={tiny_model_path}"]
    placement = [
        "trainer.placement.colocate_all=false",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.critic_num_gpus_per_node=1",
    ]
    ranks = train("ranks", *ppo, *placement, "trainer.update_ref_every_epoch=true")
    assert_close_runs(ranks, train("inline", *ppo, "trainer.update_ref_every_epoch=true"))
    for line in ("1 × 2 CPUs for policy, ref", "1 × 1 CPU for critic", "1 × 1 CPU for engine"):
        assert f"Reserved {line}" in caplog.text


def test_models_and_engines_that_leave_devices_while_idle_train_like_one_process(
    start_cluster: Callable[..., Cluster],
    train: Callable[..., Run],
    five_steps: list[str],
    tiny_model_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Evaluations, checkpoints, a reference that is updated, a lost engine, and a run that is resumed."""
    start_cluster(2)
    settings = [*PPO, f"trainer.critic.model.path={tiny_model_path}", "trainer.update_ref_every_epoch=true"]
    settings += ["trainer.eval_interval=1", "trainer.ckpt_interval=1"]
    inline = train("inline", *settings)
    engines = ["trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"]
    offloading = [*settings, *engines, "trainer.placement.offload_idle=true", "generator.weight_sync_backend=gloo"]
    kill = AtStepEnd(lambda run, step: step == 1 and kill_descendant("EngineActor"))
    overrides = [*five_steps, "trainer.run_name=offloading", *offloading]
    with caplog.at_level(logging.DEBUG, "skyrl_train.launch.lease"):
        train_with(*overrides, "trainer.max_training_steps=3", first=[kill])
        assert_close_runs(train("offloading", *offloading), inline)
    assert "was lost and is replaced" in caplog.text
    assert "Resumed from" in caplog.text
    users = re.findall(r"Shared devices go to (.*?),? after .* in which (.*) GB", caplog.text)
    assert {user for user, _ in users} == {
        "the critic",
        "the ref",
        "the policy",
        "the engine, for its weights",
        "the engine",
    }
    assert all(float(moved) > 0 for user, moved in users if user == "the critic")


def test_an_evaluation_uses_the_placed_engines(
    start_cluster: Callable[..., Cluster], five_steps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    start_cluster(1, 1)
    sampled = ["generator.eval_sampling_params.temperature=1", "generator.eval_n_samples_per_prompt=4"]
    placement = ["trainer.placement.policy_num_nodes=2", "generator.num_inference_engines=2"]
    replies = []
    for name, settings in (("inline", []), ("two", placement)):
        run = runs.train(*five_steps, *sampled, *settings, f"trainer.run_name={name}", command="generate")
        rows = read_lines(run.folder / "evals/eval_only/synthetic_catch.jsonl")
        replies.append([row["output_response"] for row in rows])
    assert "Reserved 2 × 1 CPU for engine" in caplog.text
    assert len(set(replies[0])) > 1
    assert replies[0] == replies[1]


def test_a_request_beyond_the_cluster_is_refused_at_once(
    start_cluster: Callable[..., Cluster], five_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYRL_RAY_PG_TIMEOUT_IN_S", "10000")  # longer than the test
    start_cluster(1, 2)
    message = expect_error(*five_steps, "trainer.placement.policy_num_gpus_per_node=3")
    assert "trainer.placement asks for 1 × 3 CPUs for policy, ref, engine" in message
    assert "the Ray cluster has 3 CPUs on 2 nodes: 1 + 2" in message


def test_a_cluster_that_does_not_answer_is_named(five_steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for address, problem in (
        ("127.0.0.1:1", "no Ray cluster answers there"),
        ("ray://head:10001", "Ray Client is not supported"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = expect_error(*five_steps, "trainer.placement.launcher=ray")
        assert f"RAY_ADDRESS={address}: {problem}" in message


def test_devices_that_others_hold_are_waited_for_only_for_a_while(
    start_cluster: Callable[..., Cluster], five_steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start_cluster(1)
    ray.init(address=cluster.address)
    holder = ray.util.placement_group([{"CPU": 1}])
    assert holder.wait(30)
    monkeypatch.setenv("SKYRL_RAY_PG_TIMEOUT_IN_S", "1")
    message = expect_error(*five_steps, "trainer.placement.launcher=ray")
    assert "trainer.placement asks for 1 × 1 CPU for" in message
    assert "of 1 CPU on 1 node, 0 more are free" in message


def test_nodes_that_join_late_are_waited_for(
    start_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start_cluster(1)
    ray.init(address=cluster.address)
    monkeypatch.setenv("SKYRL_RAY_JOIN_TIMEOUT_IN_S", "60")
    with ThreadPoolExecutor() as pool:
        reserving = pool.submit(Reservation, [DeviceRequest(("policy",), 2, 1)])
        with pytest.raises(TimeoutError):
            reserving.result(timeout=3)
        cluster.add_node(num_cpus=1)
        assert reserving.result(timeout=60).n_cluster_nodes == 2


def test_a_killed_rank_ends_the_run_with_its_cause_and_the_same_command_resumes(
    five_steps: list[str], train: Callable[..., Run], tiny_model_path: Path, kill_and_resume: Callable[..., str]
) -> None:
    ppo = [*PPO, f"trainer.critic.model.path={tiny_model_path}"]
    overrides = ["trainer.run_name=killed", "trainer.ckpt_interval=1", "trainer.placement.policy_num_gpus_per_node=2"]
    overrides = [*five_steps, *ppo, *overrides]
    # Two ranks of the policy, two of the critic and two of the reference.
    cause = kill_and_resume("examples.catch.main_catch", overrides, step=2, n=6, rank=1)
    assert re.search("rank .* ended during .*was killed", cause, re.DOTALL), cause
    assert_close_runs(run_of(overrides), train("inline", *ppo))
