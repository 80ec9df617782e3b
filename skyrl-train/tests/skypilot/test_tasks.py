"""The task files, read by SkyPilot itself (make test-skypilot)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sky
from sky.utils.dag_utils import load_chain_dag_from_yaml

REPOSITORY = Path(__file__).parents[3]
TASKS = sorted((REPOSITORY / "skyrl-train/tasks").glob("*.yaml"))
KEYS = ("FLEET_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
CLOUDS = {"Lambda", "RunPod", "Vast", "PrimeIntellect", "Nebius"}


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_skypilot_reads_a_task_file(path: Path) -> None:
    task = load(path, dict.fromkeys(KEYS, "key"))
    assert task.name == path.stem
    assert {str(resources.cloud) for resources in task.resources} == CLOUDS
    assert all(set(resources.accelerators) == {"H100"} for resources in task.resources)
    assert task.envs["MODALITY"] == "tool_use"
    assert task.workdir["ref"] == "main"


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_variables_and_secrets_reach_the_run(path: Path) -> None:
    task = load(path, dict.fromkeys(KEYS, "") | {"ENV_KEYS": "github"}, dict.fromkeys(KEYS, "secret-key"))
    assert task.envs["ENV_KEYS"] == "github"
    assert task.secrets["FLEET_API_KEY"].get_secret_value() == "secret-key"
    assert "secret-key" not in repr(task.secrets)
    values = task.envs_and_secrets
    assert all(values[name].get_secret_value() == "secret-key" for name in KEYS), "the empty value counts"


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("missing", KEYS)
def test_a_missing_key_is_named_before_anything_is_rented(missing: str, path: Path) -> None:
    with pytest.raises(ValueError, match=f"'{missing}' is None"):
        load(path, {name: "key" for name in KEYS if name != missing})
    load(path, {name: "" if name == missing else "key" for name in KEYS})


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_the_url_and_the_commit_of_a_fork_replace_those_of_the_file(path: Path) -> None:
    task = load(path, dict.fromkeys(KEYS, "key"))
    task.update_workdir(None, "https://github.com/me/fork.git", "0123abc")
    assert task.workdir == {"url": "https://github.com/me/fork.git", "ref": "0123abc"}


def load(path: Path, envs: dict[str, str], secrets: dict[str, str] | None = None) -> sky.Task:
    """Read a task file as `sky launch --env … --secret …` does."""
    (task,) = load_chain_dag_from_yaml(str(path), list(envs.items()), list((secrets or {}).items())).tasks
    return task


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
    assert options >= {"--cluster", "--env", "--yes", "--detach-run", "--secret", "--git-ref", "--git-url", "--infra"}
    sky_command = Path(sys.executable).with_name("sky")
    text = subprocess.run([sky_command, "launch", "--help"], capture_output=True, text=True, check=True).stdout
    assert {option for option in options if option not in text} == set()
    text = subprocess.run([sky_command, "logs", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--follow" in text


def test_the_statuses_that_the_launch_script_reads() -> None:
    codes = sky.exceptions.JobExitCode
    assert (codes.SUCCEEDED, codes.FAILED, codes.NOT_FINISHED, codes.CANCELLED) == (0, 100, 101, 103)
