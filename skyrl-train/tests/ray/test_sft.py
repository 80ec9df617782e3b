"""Training on fixed data on a Ray cluster equals that of one process, and ends with its cause."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster
from train_kit.datasets import write_answers, write_pairs
from train_kit.runs import assert_close_runs, preference_run, run_of, supervised_run, train

pytestmark = pytest.mark.timeout(600)

Overrides = Callable[..., list[str]]


@pytest.fixture
def overrides_of(tiny_model_path: Path, tmp_path: Path) -> Overrides:
    """Return the overrides of a named run of a command."""

    def make(command: str, name: str, *overrides: str) -> list[str]:
        settings = ["trainer.policy.optimizer_config.lr=1e-4", "trainer.ckpt_interval=1", *overrides]
        write, run = (write_answers, supervised_run) if command == "sft" else (write_pairs, preference_run)
        return run(tmp_path, *settings, model=tiny_model_path, data=write(tmp_path), name=name)

    return make


@pytest.mark.parametrize(
    ("command", "cpus", "placement", "reservation"),
    [
        ("sft", (1, 1), "trainer.placement.policy_num_nodes=2", "2 × 1 CPU"),
        ("dpo", (2,), "trainer.placement.policy_num_gpus_per_node=2", "1 × 2 CPUs"),
        ("reward", (2,), "trainer.placement.policy_num_gpus_per_node=2", "1 × 2 CPUs"),
    ],
)
def test_two_ranks_train_like_one_process(
    command: str,
    cpus: tuple[int, ...],
    placement: str,
    reservation: str,
    start_cluster: Callable[..., Cluster],
    overrides_of: Overrides,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_cluster(*cpus)
    inline = train(*overrides_of(command, "inline"), command=command)
    assert inline.metrics[-1].keys() >= {"train/loss", "val/loss"}
    ranks = train(*overrides_of(command, "ranks", placement), command=command)
    assert f"Reserved {reservation} for " in caplog.text
    assert_close_runs(ranks, inline, rel=1e-4)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_killed_rank_ends_the_run_with_its_cause_and_the_same_command_resumes(
    n_ranks: int, overrides_of: Overrides, kill_and_resume: Callable[..., str]
) -> None:
    placement = ["trainer.placement.launcher=ray", f"trainer.placement.policy_num_gpus_per_node={n_ranks}"]
    overrides = overrides_of("sft", "killed", *placement)
    cause = kill_and_resume("skyrl_train.entrypoints.main_sft", overrides, step=1, n=n_ranks, rank=-1)
    assert "was killed" in cause
    assert_close_runs(run_of(overrides), train(*overrides_of("sft", "inline"), command="sft"), rel=1e-4)
