"""Ray clusters on this machine, and runs of five steps that do not depend on where they run."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import ray
from ray.cluster_utils import Cluster
from train_kit import runs
from train_kit.processes import TRAIN_FOLDER, find_descendants, python, wait_until
from train_kit.runs import Run, run_of


@pytest.fixture
def start_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """Start a cluster of nodes with these numbers of CPUs, which the runs of a test use.

    With `has_gpus`, Ray also books as many GPUs on each node, which need not exist.
    """
    # A worker imports the experiment of a test from train_kit, which only pytest has on its path.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    clusters = []

    def start(*n_cpus: int, has_gpus: bool = False) -> Cluster:
        cluster = Cluster()
        for n in n_cpus:
            cluster.add_node(num_cpus=n, num_gpus=n if has_gpus else 0)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        clusters.append(cluster)
        return cluster

    yield start
    ray.shutdown()
    for cluster in clusters:
        cluster.shutdown()


@pytest.fixture
def five_steps(catch_run: list[str]) -> list[str]:
    """Overrides for a run of five steps with several updates each, which exports its weights."""
    return [
        *catch_run,
        "trainer.epochs=3",
        "trainer.max_training_steps=5",
        "trainer.policy_mini_batch_size=2",
        "trainer.critic_mini_batch_size=2",
        "trainer.policy.optimizer_config.lr=1e-4",
        "trainer.critic.optimizer_config.lr=1e-4",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.eval_interval=-1",
        "trainer.hf_save_interval=5",
    ]


@pytest.fixture
def train(five_steps: list[str]) -> Callable[..., Run]:
    """Run five steps under a name."""
    return lambda name, *overrides: runs.train(*five_steps, f"trainer.run_name={name}", *overrides)


@pytest.fixture
def kill_and_resume() -> Callable[..., str]:
    """Run a module, kill one of `n` ranks after a checkpoint, run it again, and return the error of the first run."""

    def run(module: str, overrides: list[str], *, step: int, n: int, rank: int) -> str:
        killed = run_of(overrides)
        command = [python(), "-m", module, *overrides]
        options = {"cwd": TRAIN_FOLDER, "env": os.environ | {"RAY_ADDRESS": "local"}, "text": True}
        with subprocess.Popen(command, stderr=subprocess.PIPE, **options) as process:
            wait_until((killed.folder / f"ckpts/global_step_{step}").exists)
            ranks = list(find_descendants("RankActor"))
            assert len(ranks) == n
            ranks[rank].kill()
            _, messages = process.communicate(timeout=200)
        assert process.returncode == 1
        assert messages.count("error: ") == 1
        assert "Traceback" not in messages
        assert len(killed.steps) < 6
        subprocess.run(command, check=True, **options)
        return messages.partition("error: ")[2]

    return run
