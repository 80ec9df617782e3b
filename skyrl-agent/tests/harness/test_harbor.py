"""Harbor's task folders: rows, grading, refusals, and the calls of Docker."""

from pathlib import Path
from typing import Any

import pytest
from agent_kit.harbor_tasks import write_harbor_task
from agent_kit.harnesses import fake_harness, leftovers, play

from skyrl_agent.harness.agent import HarnessAgent
from skyrl_agent.harness.harbor import harbor_rows
from skyrl_agent.harness.task import HarnessTask
from skyrl_agent.harness.training import check_tasks
from skyrl_agent.workspaces import ContainerWorkspace
from skyrl_train.errors import DataError
from skyrl_train.types import PromptRow


def to_prompt(row: dict[str, Any]) -> PromptRow:
    return PromptRow("0", row["prompt"], None, {key: value for key, value in row.items() if key != "prompt"})


async def test_tasks_are_graded_by_tests_that_the_agent_does_not_see(tmp_path: Path) -> None:
    look = "ls / /tests /solution > seen.txt; ! grep -e data.txt -e solve.sh seen.txt && echo right > answer.txt"
    write_harbor_task(tmp_path / "a", f"run=[{look}]")
    write_harbor_task(tmp_path / "b", "run=[echo wrong > answer.txt; rm given.txt]")
    rows = harbor_rows(tmp_path)
    assert [row["prompt"][0]["content"] for row in rows][1] == "run=[echo wrong > answer.txt; rm given.txt]\n"
    assert len({row["harbor_digest"] for row in rows}) == 2
    tasks = [{"task": row["prompt"][0]["content"], "harbor": row["harbor"]} for row in rows]
    (right, wrong), _ = await play(fake_harness(), tasks)
    assert (right.error, wrong.error) == (None, None)
    assert (right.total_reward, wrong.total_reward) == (1.0, 0.0)
    assert leftovers() == []


@pytest.mark.parametrize(
    ("settings", "dockerfile", "workspace", "message"),
    [
        ("", "FROM ubuntu", {}, "it needs its image; set workspace.kind=docker, or workspace.ignore_dockerfile=true"),
        ("", None, {"kind": "unisolated", "readable": ()}, "its tests run only in isolation"),
        ("", None, {"kind": "docker", "readable": ()}, "it has neither docker_image nor environment/Dockerfile"),
        ("[[steps]]\nname = 's'\n", None, {}, r"steps=.* is not supported"),
        ("[environment]\ngpus = 1\nos = 'windows'\n", None, {}, "environment.gpus=1 is not supported; environment.os"),
        (
            "[environment]\nenv = { K = '${HARBOR_KEY}' }\n",
            None,
            {},
            "it needs the variable HARBOR_KEY; set it, and add",
        ),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_before_the_run(
    settings: str, dockerfile: str | None, workspace: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_harbor_task(tmp_path / "a", "x", settings, dockerfile)
    (row,) = harbor_rows(tmp_path / "a")
    with pytest.raises(DataError, match=message):
        check_tasks(HarnessAgent(fake_harness(workspace=workspace)), [("row 0", to_prompt(row))])


DOCKER = """#!/bin/bash
echo "$@" >> {log}
case "$1 $2" in
"image inspect") [ "$3" = --format ] && echo /srv || [ -e {log}.built ] ;;
"build --quiet") touch {log}.built ;;
*) exit 1 ;;
esac
"""


def test_docker_is_called_with_the_task_s_image_limits_and_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, programs = tmp_path / "log", tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text(DOCKER.format(log=log))
    (programs / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    limits = "[environment]\ncpus = 2\nmemory_mb = 512\n"
    write_harbor_task(tmp_path / "a", "x", limits, "FROM ubuntu")
    (row,) = harbor_rows(tmp_path / "a")
    cfg = fake_harness(workspace={"kind": "docker", "readable": ()})
    check_tasks(HarnessAgent(cfg), [("row 0", to_prompt(row))])
    task = HarnessTask.from_row(to_prompt(row), cfg)
    assert f"build --quiet --tag {task.image} {tmp_path}/a/environment" in log.read_text()
    workspace = HarnessAgent(cfg)._new_workspace(task)
    assert isinstance(workspace, ContainerWorkspace)
    assert (workspace.cwd, workspace.socket is not None) == ("/srv", True)
    arguments = " ".join(workspace._settings["run_args"])
    assert arguments.startswith("--rm --network none --cpus 2.0 --memory 512m --name skyrl-agent-")
    assert f"--volume {workspace.socket and workspace.socket.parent}:/run/skyrl" in arguments
    launch = workspace.launch(["pi", "task"], {"A": "b"})
    relay = ("python3", "/run/skyrl/relay.py", "/run/skyrl/model.sock", "8000", "pi", "task")
    assert launch.argv[1:6] == ("exec", "-w", "/srv", "-e", "A=b")
    assert launch.argv[7:] == relay
