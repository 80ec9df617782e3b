"""The task files, read by SkyPilot itself (make test-skypilot)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sky

REPOSITORY = Path(__file__).parents[3]
TASKS = sorted((REPOSITORY / "skyrl-train/tasks").glob("*.yaml"))
CLOUDS = {"Lambda", "RunPod", "Vast", "PrimeIntellect", "Nebius"}


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_skypilot_reads_a_task_file(path: Path) -> None:
    task = sky.Task.from_yaml(str(path))
    assert task.name == path.stem
    assert {str(resources.cloud) for resources in task.resources} == CLOUDS
    assert all(set(resources.accelerators) == {"H100"} for resources in task.resources)
    assert task.envs["MODALITY"] == "tool_use"
    assert task.workdir["ref"] == "main"


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_variables_and_secrets_reach_the_run(path: Path) -> None:
    task = sky.Task.from_yaml(str(path))
    task.update_envs({"MODALITY": "computer_use"})
    task.update_secrets({"FLEET_API_KEY": "secret-key"})  # pragma: allowlist secret
    assert task.envs["MODALITY"] == "computer_use"
    assert task.secrets["FLEET_API_KEY"].get_secret_value() == "secret-key"
    assert "secret-key" not in repr(task.secrets)


def test_skypilot_reads_the_task_of_several_nodes() -> None:
    task = sky.Task.from_yaml(str(REPOSITORY / "skyrl-train/examples/cluster/skypilot.yaml"))
    assert (task.name, task.num_nodes) == ("skyrl", 2)
    assert [resources.accelerators for resources in task.resources] == [{"H100": 8}]
    assert task.volumes == {"/shared": "skyrl-shared"}
    assert task.envs["OVERRIDES"] == ""


def test_the_launch_script_uses_options_that_exist() -> None:
    script = (REPOSITORY / "skyrl-train/integrations/fleet/launch.sh").read_text()
    workflow = (REPOSITORY / ".github/workflows/openenv-fleet-train.yaml").read_text()
    options = set(re.findall(r"--[a-z-]+", " ".join(re.findall(r"flags\+?=\(.*\)", script + workflow))))
    assert options >= {"--cluster", "--env", "--yes", "--detach-run", "--secret", "--git-ref", "--infra"}
    sky_command = Path(sys.executable).with_name("sky")
    text = subprocess.run([sky_command, "launch", "--help"], capture_output=True, text=True, check=True).stdout
    assert {option for option in options if option not in text} == set()
    text = subprocess.run([sky_command, "logs", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--follow" in text


def test_the_statuses_that_the_launch_script_reads() -> None:
    codes = sky.exceptions.JobExitCode
    assert (codes.SUCCEEDED, codes.FAILED, codes.NOT_FINISHED, codes.CANCELLED) == (0, 100, 101, 103)
