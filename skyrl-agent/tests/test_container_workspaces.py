"""Workspaces in containers: how mini-swe-agent starts them, and starts that fail, hang or are cancelled."""

import asyncio
import threading
from pathlib import Path

import pytest
from agent_kit.containers import DockerStandIn
from agent_kit.processes import unique_sleep, workspace_threads
from train_kit.processes import wait_until

from skyrl_agent.workspaces import CommandResult, ContainerWorkspace, WorkspaceError, start_workspace


def new_workspace(docker: DockerStandIn, image: str | None = None, **settings: object) -> ContainerWorkspace:
    return ContainerWorkspace(image or docker.image, "/testbed", {"executable": docker.executable, **settings})


def test_unknown_images_and_environments_are_named(docker: DockerStandIn) -> None:
    workspace = new_workspace(docker, "none")
    with pytest.raises(WorkspaceError, match=r"container of none did not start.*Unable to find image"):
        workspace.start()
    workspace.close()
    with pytest.raises(ValueError, match="environment_class='local' must be docker or singularity"):
        ContainerWorkspace("x", "/", {"environment_class": "local"})


@pytest.mark.parametrize("kind", ["stand-in", "podman"])
def test_the_startup_file_is_for_commands_only(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """An agent that writes `exit` into it cannot break the workspace's own scripts."""
    if kind == "podman":
        startup, image = "/root/.bashrc", request.getfixturevalue("image")
        workspace = ContainerWorkspace(image, "/testbed", {"executable": "podman", "env": {"BASH_ENV": startup}})
    else:
        startup = str(tmp_path / "startup")
        workspace = new_workspace(request.getfixturevalue("docker"), env={"BASH_ENV": startup})
    workspace.start()
    workspace.execute(f"echo x=1 >{startup}", 30)
    assert workspace.execute("echo [$x]", 30).output == "[1]\n"
    workspace.execute(f"echo 'exit 3' >{startup}", 30)
    assert workspace.execute("true", 30).status == 3
    workspace.close()


SINGULARITY = """#!/bin/bash
case "$1" in
build) cp -r "${4#docker://}" "$3" ;;
*) eval "folder=\\${$(($# - 3))}"; cd "$folder" && exec bash -c "${@: -1}" ;;
esac
"""


def test_singularity_is_called_as_mini_swe_agent_does(docker: DockerStandIn, tmp_path: Path) -> None:
    executable = tmp_path / "singularity"
    executable.write_text(SINGULARITY, encoding="utf-8")
    executable.chmod(0o755)
    settings = {"environment_class": "singularity", "executable": str(executable)}
    workspace = ContainerWorkspace(docker.image, str(tmp_path / "work"), settings)
    workspace.start()
    workspace.write_bytes("a", b"x")
    assert workspace.execute("cat a; exit 3", 30) == CommandResult("x", 3)
    assert workspace.execute(unique_sleep(), 1).status is None
    workspace.close()
    with pytest.raises(WorkspaceError):
        workspace.execute("true", 30)


async def test_a_container_that_does_not_start_in_time_is_an_error_and_leaves_nothing(docker: DockerStandIn) -> None:
    workspace = new_workspace(docker, "hangs", pull_timeout=2)
    with pytest.raises(WorkspaceError, match=r"did not start within 0.5 s"):
        await start_workspace(workspace, 0.5, lambda _: None)
    wait_until(lambda: not workspace_threads())
    assert docker.containers() == []


async def test_a_workspace_that_starts_after_it_was_closed_is_released(docker: DockerStandIn) -> None:
    reached, release = threading.Event(), threading.Event()

    class Slow(ContainerWorkspace):
        def _start(self) -> None:
            reached.set()
            release.wait()
            super()._start()

    workspace = Slow(docker.image, "/testbed", {"executable": docker.executable})
    start = asyncio.create_task(start_workspace(workspace, 60, lambda _: None))
    await asyncio.to_thread(reached.wait)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    release.set()
    wait_until(lambda: not workspace_threads())
    assert docker.containers() == []
