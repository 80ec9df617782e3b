"""The task files of SkyPilot, the workflow, and their scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet_tasks import fleet_entries, write_tasks
from transformers import PreTrainedTokenizerBase

from integrations.fleet import slack
from integrations.fleet.env import FleetSettings
from skyrl_train.config.validation import WARNINGS, find_problems
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.models.tiny import tiny_qwen3

REPOSITORY = Path(__file__).parents[5]
TASKS = sorted((REPOSITORY / "skyrl-train/tasks").glob("openenv-fleet-*.yaml"))
WORKFLOW = REPOSITORY / ".github/workflows/openenv-fleet-train.yaml"
SCRIPTS = REPOSITORY / "skyrl-train/integrations/fleet"
STAND_IN = Path(__file__).parents[2] / "fleet_stand_in"


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


def test_the_defaults_of_the_first_task_file() -> None:
    assert {
        "trainer.policy.model.path=Qwen/Qwen2.5-1.5B-Instruct",
        "trainer.algorithm.advantage_estimator=grpo",
        "trainer.policy.optimizer_config.lr=1e-6",
        "trainer.train_batch_size=4",
        "trainer.epochs=20",
        "generator.max_turns=50",
        "trainer.ckpt_interval=10",
    } <= set(overrides(REPOSITORY / "skyrl-train/tasks/openenv-fleet-grpo.yaml"))


def test_the_commands_of_a_task_file_train_and_resume(tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    task = load(REPOSITORY / "skyrl-train/tasks/openenv-fleet-grpo.yaml")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    tiny_qwen3(tiny_tokenizer, seed=0, context_length=8192).save_pretrained(tmp_path / "model")
    tasks = write_tasks(tmp_path / "exported.json", fleet_entries({"github": (6, 0), "outlook": (1, 0)}))
    small = {
        "trainer.policy.model.path": tmp_path / "model",
        "trainer.output_dir": tmp_path,
        "trainer.max_prompt_length": 4096,
        "trainer.ckpt_interval": 1,
        "trainer.eval_before_train": "false",
        "generator.max_input_length": 8000,
        "generator.max_turns": 2,
        "generator.sampling_params.max_generate_length": 8,
        "generator.eval_sampling_params.max_generate_length": 8,
    }
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WANDB_", "FLEET_"))}
    environ |= {name: str(value) for name, value in task["envs"].items()}
    environ |= {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(STAND_IN), *sys.path]),
        "DATA_DIR": str(tmp_path / "data"),
        "TASKS_JSON": str(tasks),
        "FLEET_API_KEY": "test",  # pragma: allowlist secret
        "LOGGER": "jsonl",
        "INFERENCE_BACKEND": "hf",
        "ENV_KEYS": "github,outlook",
        "RUN_NAME": "test_run",
    }
    for n_epochs in (1, 2):  # of one step
        environ["OVERRIDES"] = " ".join(f"{key}={value}" for key, value in small.items())
        environ["OVERRIDES"] += f" trainer.epochs={n_epochs}"
        for command in (task["setup"], task["run"]):
            result = subprocess.run(
                ["bash", "-c", command], cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=200
            )
            assert result.returncode == 0, result.stderr
    folder = tmp_path / "fleet-github-outlook-grpo/test_run"
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step for step in steps if step > 0] == [1, 2]
    assert (folder / "evals/global_step_2/outlook.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"FLEET_API_KEY": ""}, "FLEET_API_KEY is not set"),
        ({"LOGGER": "wandb"}, "WANDB_API_KEY is not set"),
        ({"MODALITY": "tools"}, "MODALITY='tools' must be"),
        ({"TASKS_JSON": ""}, "set AWS_ACCESS_KEY_ID"),
    ],
)
def test_the_setup_checks_its_variables(change: dict[str, str], message: str, tmp_path: Path) -> None:
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "FLEET_API_KEY": "secret-key",  # pragma: allowlist secret
        "LOGGER": "jsonl",
        "MODALITY": "tool_use",
        "TASKS_JSON": "x",
    }
    result = subprocess.run(
        ["bash", SCRIPTS / "setup.sh"], cwd=REPOSITORY, env=environ | change, capture_output=True, text=True
    )
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


def launch(tmp_path: Path, results: list[int]) -> tuple[int, list[str], str]:
    """Launch with a `sky` that ends with these statuses; return the status, the calls but `down`, and the output."""
    sky, calls, queue = tmp_path / "sky", tmp_path / "calls", tmp_path / "results"
    sky.write_text(SKY)
    sky.chmod(0o755)
    queue.write_text("".join(f"{status}\n" for status in results))
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "RESULTS": str(queue),
        "CLUSTER": "fleet-1",
        "RUN_NAME": "run_1",
        "FLEET_API_KEY": "secret-key",  # pragma: allowlist secret
        "PROVISIONING_WAIT_S": "0",
        "RECONNECT_WAIT_S": "0",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    result = subprocess.run(
        ["bash", SCRIPTS / "launch.sh", "task.yaml", "--env", "MODALITY"], env=environ, capture_output=True, text=True
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
    assert first == (
        "launch --cluster fleet-1 --env RUN_NAME --yes --detach-run --env MODALITY --secret FLEET_API_KEY task.yaml"
    )
    assert "Run run_1" in (tmp_path / "summary.md").read_text() or status == 2


def test_credentials_are_files_that_only_the_owner_reads(tmp_path: Path) -> None:
    keys = {f"{cloud}_API_KEY": f"secret-{cloud}" for cloud in ("LAMBDA", "RUNPOD", "VAST", "PRIME_INTELLECT")}
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    result = subprocess.run(
        ["bash", SCRIPTS / "credentials.sh"], env=environ | keys, capture_output=True, text=True, check=True
    )
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
    result = subprocess.run(
        ["bash", SCRIPTS / "credentials.sh"], env=environ | keys, capture_output=True, text=True, check=True
    )
    assert "VAST_API_KEY is not set" in result.stdout


def test_the_workflow_has_the_inputs_and_secrets_of_the_guide() -> None:
    text, workflow = WORKFLOW.read_text(), load(WORKFLOW)
    inputs = workflow[True]["workflow_dispatch"]["inputs"]  # `on` is true in YAML 1.1
    assert workflow["name"] == "Fleet Task Training (SkyPilot)"
    assert {"modality", "env_key", "task_name"} <= set(inputs)
    assert inputs["modality"]["options"] == ["tool_use", "computer_use"]
    assert {f"{name}.yaml" for name in inputs["task_name"]["options"]} == {task.name for task in TASKS}
    assert set(re.findall(r"secrets\.(\w+)", text)) == {
        "FLEET_API_KEY",
        "WANDB_API_KEY_TOOL_USE",
        "WANDB_API_KEY_COMPUTER_USE",
        "LAMBDA_API_KEY",
        "RUNPOD_API_KEY",
        "VAST_API_KEY",
        "PRIME_INTELLECT_API_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "SLACK_BOT_TOKEN",
    }
    for step in workflow["jobs"]["train"]["steps"]:
        command = step.get("run", "")
        assert "${{" not in command, "inputs reach a shell only as variables"
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)


def test_slack_messages(slack_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    slack.main(["Started"])
    slack.main(["Finished", "--thread", capsys.readouterr().out.strip()])
    assert slack_server.received == [
        ("Bearer secret-token", {"channel": "#fleet-training-runs", "text": "Started"}),
        ("Bearer secret-token", {"channel": "#fleet-training-runs", "text": "Finished", "thread_ts": "12.5"}),
    ]
    slack_server.answer = {"ok": False, "error": "not_in_channel"}
    capsys.readouterr()
    slack.main(["Hello"])
    output = capsys.readouterr()
    assert "not_in_channel" in output.err
    assert "secret-token" not in output.err + output.out


def test_without_a_token_or_a_network_slack_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLACK_BOT_TOKEN", raising=False)
    assert slack.post("Hello") is None
    monkeypatch.setenv("SLACK_BOT_TOKEN", "x")
    monkeypatch.setenv("SLACK_API_URL", "http://127.0.0.1:9")
    with pytest.raises(slack.SlackError, match="cannot be reached"):
        slack.post("Hello")
