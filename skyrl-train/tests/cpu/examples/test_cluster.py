"""The files that start runs on clusters: their commands, and the devices that they ask for."""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from train_kit.datasets import write_prompts
from train_kit.processes import TRAIN_FOLDER, write_commands
from train_kit.runs import small_run

from skyrl_train.config import parse_cli
from skyrl_train.config.rules import WARNINGS, find_problems

FOLDER = TRAIN_FOLDER / "examples/cluster"
ROOT = TRAIN_FOLDER.parent
CLUSTER_COMMANDS = ("ray", "srun", "ssh", "scontrol")


def run_script(name: str, overrides: list[str], commands: Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a script with the commands of a folder, and return its output."""
    finished = subprocess.run(
        ["bash", str(FOLDER / name), *overrides],
        cwd=cwd,
        env=os.environ | variables | {"PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture
def run(tiny_model_path: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run on one row."""
    data = write_prompts(tmp_path / "train.jsonl", 1, "gsm8k", reward_spec={"ground_truth": "2"})
    return small_run(
        tmp_path, "trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", model=tiny_model_path, data=data
    )


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with `skyrl`, and with commands of a cluster that only print their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in CLUSTER_COMMANDS:
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    return write_commands(folder)


def test_nodes_over_ssh(run: list[str], commands: Path) -> None:
    output = run_script("start_nodes.sh", [*run, "--dry-run"], commands, NODES="one two three", GPUS_PER_NODE="4")
    assert "ray start --head --port=6379" in output
    for node in ("two", "three"):
        assert f"ssh {node} {commands}/ray start --address=one:6379" in output
        assert f"ssh {node} {commands}/ray stop" in output
    assert "policy 3 × 4" in output
    assert "12 engines" in output


def test_a_slurm_job(run: list[str], commands: Path) -> None:
    variables = {
        "SLURM_JOB_NODELIST": "one",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_NAME": "test_run",
    }
    output = run_script("slurm.sbatch", [*run, "--dry-run"], commands, **variables)
    assert "ray start --head --port=6379 --block" in output
    assert "--nodes=1 --ntasks=1 --exclude=" in output
    assert "policy 2 × 8" in output
    assert "16 engines" in output
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", (FOLDER / "slurm.sbatch").read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == "1", "one `ray start` a node"


def test_a_submitted_job(run: list[str], commands: Path) -> None:
    output = run_script("ray_job.sh", run, commands)
    words = shlex.split(output)
    assert words[:5] == ["ray", "job", "submit", "--working-dir=.", "--"]
    assert words[5:7] == ["skyrl", "train"]


def test_a_job_of_skypilot(run: list[str], commands: Path, tmp_path: Path) -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    data, template = tmp_path / "data/gsm8k/train.parquet", tmp_path / "sky_templates/ray/start_cluster"
    for file in (data, template, tmp_path / ".venv/bin/activate"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    template.write_text("#!/bin/sh\necho starting Ray\n")
    template.chmod(0o755)
    (tmp_path / "skyrl-train").mkdir()
    (tmp_path / "skyrl-train/run.sh").write_text(task["run"])
    variables = {
        **{name: str(value) for name, value in task["envs"].items()},
        "HOME": str(tmp_path),
        "SHARED": str(tmp_path),
        "SKYPILOT_NODE_IPS": "192.0.2.1\n192.0.2.2",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "OVERRIDES": " ".join([*run, "generator.backend=hf", "--dry-run"]),
    }
    script = str(tmp_path / "skyrl-train/run.sh")
    first, second = (
        run_script(script, [], commands, cwd=tmp_path, **variables, SKYPILOT_NODE_RANK=rank) for rank in ("0", "1")
    )
    assert second == "starting Ray\n", "the first node drives"
    assert first.startswith(second)
    assert "policy 2 × 8" in first
    assert "16 engines" in first


def test_a_job_on_kubernetes_asks_for_the_devices_of_its_pods() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    command, subcommand, *overrides = shlex.split(spec["entrypoint"])
    assert (command, subcommand) == ("skyrl", "train")
    assert "generator.backend=vllm" in overrides
    cfg = parse_cli([*overrides, "generator.backend=hf"])
    assert find_problems(cfg, WARNINGS) == []
    placement = cfg.trainer.placement
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    n_gpus = [group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for group in groups]
    assert set(n_gpus) == {placement.policy_num_gpus_per_node}
    assert 1 + sum(group["replicas"] for group in groups[1:]) == placement.policy_num_nodes
    assert "SKYRL_RAY_JOIN_TIMEOUT_IN_S" in yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]


def test_the_image_copies_what_exists_and_installs_the_engine_of_its_job() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY .*", text, re.MULTILINE):
        _, *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert re.findall(r"^ARG EXTRAS=(.*)", text, re.MULTILINE) == ["vllm"]
    sources = tomllib.loads((ROOT / "skyrl-train/pyproject.toml").read_text())["tool"]["uv"]["sources"]
    assert all(f"COPY {name} {name}\n" in text for name in ["skyrl-train", *sources]), "uv reads every source"
