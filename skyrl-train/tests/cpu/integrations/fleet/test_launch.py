"""The task files of SkyPilot, the workflow, and their scripts."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_kit.fleet.tasks import OPENENV, fleet_entries, write_tasks
from train_kit.processes import python
from train_kit.runs import Run

from integrations.fleet.entrypoints.main_fleet import read_config
from integrations.fleet.env import FleetSettings
from skyrl_train.config.rules import WARNINGS, find_problems
from skyrl_train.entrypoints.main_base import parse_cli

REPOSITORY = Path(__file__).parents[5]
TASKS = sorted((REPOSITORY / "skyrl-train/tasks").glob("openenv-fleet-*.yaml"))
WORKFLOW = REPOSITORY / ".github/workflows/openenv-fleet-train.yaml"
SCRIPTS = REPOSITORY / "skyrl-train/integrations/fleet"
FIRST_TASK = REPOSITORY / "skyrl-train/tasks/openenv-fleet-grpo.yaml"


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def overrides(task: Path) -> list[str]:
    """Return the overrides in the `run` command of a task file, as the shell passes them."""
    command = load(task)["run"].replace("bash skyrl-train/integrations/fleet/train.sh", "printf '%s\\n'")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.stem)
def test_the_settings_of_a_task_file_are_valid(task: Path) -> None:
    cfg = parse_cli([*overrides(task), "generator.backend=hf", "trainer.placement.launcher=auto"])
    assert cfg.generator.sampling_params.stop == ["</tool_call>"]
    assert cfg.generator.max_turns == 50
    assert find_problems(cfg, WARNINGS) == []
    FleetSettings(**cfg.environment.skyrl_gym.env_config("fleet_task"))
    read_config([*overrides(task), "generator.backend=hf", "trainer.placement.launcher=auto"])  # time limits too
    n_rollouts = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    assert cfg.environment.skyrl_gym.max_env_workers >= n_rollouts  # separate processes play all of a step at once


def bash(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run bash in the root of the repository, with these variables only."""
    variables = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        ["bash", *command], cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False
    )


def test_the_commands_of_a_task_file_train_and_resume(fleet_model: Path, tmp_path: Path) -> None:
    task = load(FIRST_TASK)
    tasks = write_tasks(tmp_path / "tasks.json", fleet_entries({"github": (6, 0), "outlook": (1, 0)}))
    overrides = [
        f"trainer.policy.model.path={fleet_model}",
        f"trainer.output_dir={tmp_path}",
        "trainer.max_prompt_length=4096",
        "trainer.ckpt_interval=1",
        "trainer.eval_before_train=false",
        "generator.max_input_length=8000",
        "generator.max_turns=2",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=8",
        "generator.eval_sampling_params.max_generate_length=8",
    ]
    environment = {
        **{name: str(value or "") for name, value in task["envs"].items()},
        "HOME": str(tmp_path),
        "PYTHON": python(),
        "PYTHONPATH": os.pathsep.join([str(OPENENV), *sys.path]),
        "DATA_DIR": str(tmp_path / "data"),
        "TASKS_JSON": str(tasks),
        "FLEET_API_KEY": "test",  # pragma: allowlist secret
        "LOGGER": "jsonl",
        "INFERENCE_BACKEND": "hf",
        "ENV_KEYS": "github,outlook",
        "RUN_NAME": "test_run",
    }
    for n_epochs in (1, 2):  # of one step
        environment["OVERRIDES"] = " ".join([*overrides, f"trainer.epochs={n_epochs}"])
        for command in (task["setup"], task["run"]):
            result = bash("-c", command, **environment)
            assert result.returncode == 0, result.stderr
    run = Run(tmp_path / "fleet-github-outlook-grpo/test_run")
    assert [step for step in run.steps if step > 0] == [1, 2]
    assert (run.folder / "evals/global_step_2/outlook.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FLEET_API_KEY": ""}, "FLEET_API_KEY is not set"),
        ({"LOGGER": "wandb"}, "WANDB_API_KEY is not set"),
        ({"MODALITY": "tools"}, "MODALITY='tools' must be"),
        ({"MODALITY": "computer_use"}, "MODALITY=computer_use shows screenshots, and the task file's model reads only"),
        ({"MODALITY": "all"}, "MODALITY='all' must be tool_use or computer_use"),
        (
            {"MODALITY": "computer_use", "OVERRIDES": "trainer.policy.model.path=Qwen/Qwen3-VL-4B-Instruct"},
            "cannot import envs.fleet_env.task_env",
        ),
        ({"TASKS_JSON": ""}, "AWS_ACCESS_KEY_ID is not set; pass --env AWS_ACCESS_KEY_ID=$AWS_ACCESS_KEY_ID"),
        ({"TASKS_JSON": "", "AWS_ACCESS_KEY_ID": "k"}, "AWS_SECRET_ACCESS_KEY is not set"),
        ({}, "cannot import envs.fleet_env.task_env"),
        ({"ENV_PYTHON": "/nowhere/python"}, "/nowhere/python cannot play Fleet tasks"),
    ],
)
def test_the_setup_checks_its_variables(change: Mapping[str, str], message: str, tmp_path: Path) -> None:
    environment = {
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLEET_API_KEY": "secret-key",  # pragma: allowlist secret
        "LOGGER": "jsonl",
        "MODALITY": "tool_use",
        "TASKS_JSON": "x",
    }
    result = bash(SCRIPTS / "setup.sh", **environment | change)
    assert result.returncode == 1
    assert message in result.stderr
    assert "secret-key" not in result.stdout + result.stderr


SKY = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
[[ $1 != down ]] || exit 0
read -r status < <(sed -n 1p "$RESULTS")
sed -i 1d "$RESULTS"
exit "$status"
"""


KEYS = dict.fromkeys(("FLEET_API_KEY", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "secret-key")


def launch(tmp_path: Path, results: list[int]) -> tuple[int, list[str], str]:
    """Launch with a `sky` that ends with these statuses; return the status, the calls but `down`, and the output."""
    sky, calls, queue = tmp_path / "sky", tmp_path / "calls", tmp_path / "results"
    sky.write_text(SKY)
    sky.chmod(0o755)
    queue.write_text("".join(f"{status}\n" for status in results))
    result = bash(
        *(SCRIPTS / "launch.sh", "task.yaml", "--env", "MODALITY"),
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        CALLS=str(calls),
        RESULTS=str(queue),
        CLUSTER="fleet-1",
        RUN_NAME="run_1",
        SECRETS=" ".join([*KEYS, "SLACK_BOT_TOKEN"]),
        PROVISIONING_WAIT_S="0",
        RECONNECT_WAIT_S="0",
        GITHUB_STEP_SUMMARY=str(tmp_path / "summary.md"),
        **KEYS,
    )
    lines = calls.read_text().splitlines()
    assert "secret-key" not in result.stdout + result.stderr + "".join(lines)
    assert not queue.read_text(), "sky was called less often than expected"
    return result.returncode, [line.split()[0] for line in lines if not line.startswith("down")], result.stdout


@pytest.mark.parametrize(
    ("results", "status", "calls"),
    [
        ([0, 0], 0, ["launch", "logs"]),
        ([1, 1, 0, 0], 0, ["launch", "launch", "launch", "logs"]),  # no capacity at first
        ([1, 1, 1, 1], 2, ["launch"] * 4),
        ([0, 100, 0, 0], 0, ["launch", "logs", "launch", "logs"]),  # a crash resumes
        ([0, 100, 0, 100, 0, 100], 1, ["launch", "logs"] * 3),
        ([0, 101, 101, 0], 0, ["launch", "logs", "logs", "logs"]),  # the connection was lost, the run was not
        ([0, 103], 103, ["launch", "logs"]),  # cancelled
    ],
)
def test_only_provisioning_is_repeated(results: list[int], status: int, calls: list[str], tmp_path: Path) -> None:
    returned, made, _ = launch(tmp_path, results)
    assert (returned, made) == (status, calls)
    first = (tmp_path / "calls").read_text().splitlines()[0]
    secrets = " ".join(f"--env {name}= --secret {name}" for name in KEYS)
    assert first == (
        f"launch --cluster fleet-1 --env RUN_NAME --yes --detach-run --env MODALITY {secrets} --env SLACK_BOT_TOKEN= "
        "task.yaml"
    )
    assert "Run run_1" in (tmp_path / "summary.md").read_text() or status == 2


@pytest.mark.parametrize("missing", KEYS)
def test_nothing_is_rented_without_a_key(missing: str, tmp_path: Path) -> None:
    keys = {name: key for name, key in KEYS.items() if name != missing}
    variables = {"CLUSTER": "a", "RUN_NAME": "b", "PATH": "/usr/bin:/bin", "PROVISIONING_WAIT_S": "0"}
    result = bash(SCRIPTS / "launch.sh", "task.yaml", **variables, **keys)
    assert (result.returncode, result.stdout) == (3, "")
    assert f"{missing} is not set" in result.stderr


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.stem)
def test_exactly_the_keys_that_a_run_needs_have_no_default(task: Path) -> None:
    assert {name for name, value in load(task)["envs"].items() if value is None} == set(KEYS)


def test_the_workflow_checks_its_runner(tmp_path: Path) -> None:
    """The programs that the check names are all that the workflow and its scripts call."""
    for name in ("sky", "aws", "git", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bash").symlink_to("/bin/bash")
    complete = {"PATH": str(tmp_path), "MODALITY": "tool_use", **KEYS}
    visual = {"MODALITY": "computer_use", "OVERRIDES": "trainer.policy.model.path=Qwen/Qwen3-VL-4B-Instruct"}
    for change in ({}, visual):
        assert bash(SCRIPTS / "check_runner.sh", **complete | change).stderr == ""
    for change, message in (
        ({"MODALITY": "computer_use"}, "runner: modality computer_use shows screenshots, and"),
        *(({name: ""}, f"runner: the secret {name} is not set") for name in KEYS),
    ):
        result = bash(SCRIPTS / "check_runner.sh", **complete | change)
        assert (result.returncode, result.stderr.startswith(message)) == (1, True), result.stderr
    for name in ("sky", "aws", "git", "python3"):
        (tmp_path / name).unlink()
    result = bash(SCRIPTS / "check_runner.sh", **complete)
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["sky", "aws", "git", "python3"]


def test_the_workflow_trains_the_commit_of_its_own_repository(tmp_path: Path) -> None:
    (step,) = (step for step in load(WORKFLOW)["jobs"]["train"]["steps"] if step.get("name") == "Train")
    sky = tmp_path / "sky"
    sky.write_text('#!/bin/sh\necho "$*" >> "$CALLS"\n')
    sky.chmod(0o755)
    result = bash(
        "-c",
        step["run"],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        CALLS=str(tmp_path / "calls"),
        GITHUB_SERVER_URL="https://github.com",
        GITHUB_REPOSITORY="me/fork",
        GITHUB_SHA="abc",
        CLUSTER="c",
        RUN_NAME="r",
        CLOUD="any",
        TASK_NAME="t",
        MODALITY="tool_use",
        **dict.fromkeys((*KEYS, "WANDB_API_KEY_TOOL_USE"), "k"),
    )
    assert result.returncode == 0, result.stderr
    assert "--git-url https://github.com/me/fork.git --git-ref abc" in (tmp_path / "calls").read_text()


def test_the_separate_interpreter_plays_the_environments(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    variables = {"HOME": str(tmp_path), "PYTHON": str(program), "MODALITY": "tool_use"}
    separate = {"environment.skyrl_gym.isolation=process", "environment.skyrl_gym.python=/venv/bin/python"}
    for environment, expected in ((variables, set()), (variables | {"ENV_PYTHON": "/venv/bin/python"}, separate)):
        lines = bash(SCRIPTS / "train.sh", **environment).stdout.splitlines()
        assert separate & set(lines) == expected
        cfg = read_config([line for line in lines[2:] if not line.startswith(("trainer.logger", "generator.backend"))])
        assert cfg.environment.skyrl_gym.call_timeout_seconds == 960  # above DEFAULT_CREATE_TIMEOUT of fleet-python


def test_credentials_are_files_that_only_the_owner_reads(tmp_path: Path) -> None:
    keys = {f"{cloud}_API_KEY": f"secret-{cloud}" for cloud in ("LAMBDA", "RUNPOD", "VAST", "PRIME_INTELLECT")}
    result = bash(SCRIPTS / "credentials.sh", HOME=str(tmp_path), **keys)
    assert result.returncode == 0
    assert "secret" not in result.stdout + result.stderr
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_file()}
    assert set(files) == {
        ".lambda_cloud/lambda_keys",
        ".runpod/config.toml",
        ".config/vastai/vast_api_key",
        ".prime/config.json",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in files.values())
    prime = json.loads(files[".prime/config.json"].read_text())
    assert prime["api_key"] == "secret-PRIME_INTELLECT"  # pragma: allowlist secret
    del keys["VAST_API_KEY"]
    result = bash(SCRIPTS / "credentials.sh", HOME=str(tmp_path), **keys)
    assert result.returncode == 0
    assert "VAST_API_KEY is not set" in result.stdout


def test_the_workflow_offers_every_task_and_passes_inputs_as_variables() -> None:
    workflow = load(WORKFLOW)
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # `on` is true in YAML 1.1
    assert {f"{name}.yaml" for name in inputs["task_name"]["options"]} == {task.name for task in TASKS}
    for step in workflow["jobs"]["train"]["steps"]:
        command = step.get("run", "")
        assert "${{" not in command, "inputs reach a shell only as variables"
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
