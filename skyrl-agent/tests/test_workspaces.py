"""Workspaces: commands, files, time limits, and the processes and folders that they must not leave behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from containers import build_podman_image, remove_podman_image, sleep, write_stand_in

from skyrl_agent.workspaces import (
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    CommandResult,
    ContainerWorkspace,
    LocalWorkspace,
    Workspace,
    WorkspaceError,
    in_thread,
    open_workspace,
    start_workspace,
)

NO_MINI_SWE = "mini-swe-agent is not installed: pip install './skyrl-agent[swe]'"
IMAGE = f"localhost/skyrl-agent-workspaces:{os.getpid()}"


@pytest.fixture(scope="module")
def podman_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    pytest.importorskip("minisweagent", reason=NO_MINI_SWE)
    build_podman_image(IMAGE, tmp_path_factory.mktemp("image"))
    yield IMAGE
    remove_podman_image(IMAGE)


@pytest.fixture
def docker(tmp_path: Path) -> str:
    """The stand-in, whose image `tmp_path/image` is empty."""
    pytest.importorskip("minisweagent", reason=NO_MINI_SWE)
    (tmp_path / "image").mkdir()
    return write_stand_in(tmp_path)


@pytest.fixture(params=["local", "stand-in", "podman"])
def workspace(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Workspace]:
    match request.param:
        case "local":
            created: Workspace = LocalWorkspace()
        case "stand-in":
            executable = request.getfixturevalue("docker")
            created = ContainerWorkspace(str(tmp_path / "image"), "/testbed", {"executable": executable})
        case _:
            image = request.getfixturevalue("podman_image")
            created = ContainerWorkspace(image, "/testbed", {"executable": "podman"})
    created.start()
    yield created
    created.close()


def is_alive(command: str) -> bool:
    """Return True if a process of this machine has these arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().replace(b"\0", b" ").strip() == command.encode():
                return True
    return False


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_command_returns_its_output_and_its_exit_status(workspace: Workspace) -> None:
    assert workspace.execute("echo out; echo error >&2; exit 3", 30) == CommandResult("out\nerror\n", 3)
    assert workspace.execute("true", 30) == CommandResult("", 0)
    assert workspace.execute("echo 'a\"b' $((1 + 1)) \\\n  'c\nd'", 30) == CommandResult('a"b 2 c\nd\n', 0)


def test_each_command_starts_in_the_folder_with_an_empty_input(workspace: Workspace) -> None:
    workspace.execute("cd /tmp; x=1", 30)
    assert workspace.execute("touch here; cat; echo [$x]", 30).output == "[]\n"
    assert workspace.execute("ls", 30).output == "here\n"


def test_a_command_that_hangs_is_killed_with_its_children(workspace: Workspace) -> None:
    started = time.monotonic()
    result = workspace.execute(f"echo before; {sleep(11)} & {sleep(12)}", 1)
    assert result == CommandResult("before\n", None)
    assert time.monotonic() - started < 10
    assert wait_until(lambda: not is_alive(sleep(11)) and not is_alive(sleep(12)))
    assert workspace.execute("echo after", 30).output == "after\n"


@pytest.mark.parametrize(
    "command", [f"trap '' TERM INT HUP; {sleep(13)}; {sleep(13)}", f"exec {sleep(13)}"], ids=["trap", "exec"]
)
def test_a_command_cannot_ignore_its_time_limit(workspace: Workspace, command: str) -> None:
    assert workspace.execute(command, 1).status is None
    assert wait_until(lambda: not is_alive(sleep(13)))


def test_background_processes_do_not_delay_their_command_and_end_with_the_workspace(workspace: Workspace) -> None:
    started = time.monotonic()
    result = workspace.execute(f"{sleep(14)} & setsid {sleep(15)} & echo started", 30)
    assert result == CommandResult("started\n", 0)
    assert time.monotonic() - started < 10
    assert wait_until(lambda: is_alive(sleep(14)) and is_alive(sleep(15)))
    workspace.close()
    assert wait_until(lambda: not is_alive(sleep(14)) and not is_alive(sleep(15)))


def test_long_output_keeps_its_beginning_and_its_end(workspace: Workspace) -> None:
    result = workspace.execute("echo first; yes | head -c 50000000; echo; echo last", 60)
    assert result.status == 0
    assert result.output.startswith("first\ny\n")
    assert result.output.endswith("\nlast\n")
    assert "[the middle of the output is left out]" in result.output
    assert len(result.output) < MAX_OUTPUT_BYTES + 100


def test_output_of_any_bytes_is_text(workspace: Workspace) -> None:
    result = workspace.execute(r"printf 'a\377\000\033[1mb\n'; exit 1", 30)
    assert result.status == 1
    assert result.output.replace("\0", "") == "a\ufffd\x1b[1mb\n"


def test_a_command_that_kills_all_shells_is_a_result(workspace: Workspace) -> None:
    result = workspace.execute("kill -KILL $PPID; kill -KILL $$", 30)
    assert result.status not in (0, None)
    assert workspace.execute("echo alive", 30).output == "alive\n"


def test_a_missing_folder_is_reported_to_the_command(workspace: Workspace) -> None:
    workspace.execute('rm -rf "$PWD"', 30)
    result = workspace.execute("echo here", 30)
    assert result.status != 0
    assert "cd" in result.output


@pytest.mark.parametrize("content", [b"", b"\r\n\0\xff", "ü\n".encode() * 60_000], ids=["empty", "bytes", "long"])
def test_files_are_read_as_they_were_written(workspace: Workspace, content: bytes) -> None:
    workspace.write_bytes("a folder/it's -x", content)
    assert workspace.read_bytes("a folder/it's -x") == content
    assert workspace.execute('cat "a folder/it\'s -x" | wc -c', 30).output.strip() == str(len(content))
    workspace.write_bytes("-n", content)
    assert workspace.read_bytes("-n") == content


def test_files_that_cannot_be_read_or_written_are_errors(workspace: Workspace) -> None:
    workspace.execute(f"mkdir d; mkfifo pipe; head -c {MAX_FILE_BYTES + 1} /dev/zero >large", 60)
    with pytest.raises(IsADirectoryError, match="d is a directory"):
        workspace.read_bytes("d")
    with pytest.raises(FileNotFoundError, match="none does not exist"):
        workspace.read_bytes("none")
    with pytest.raises(OSError, match="is not a regular file"):
        workspace.read_bytes("/dev/zero")
    with pytest.raises(OSError, match="more than 16 MiB"):
        workspace.read_bytes("large")
    with pytest.raises(OSError, match="cannot be written"):
        workspace.write_bytes("d", b"x")
    with pytest.raises(OSError, match="is not a path"):
        workspace.read_bytes("a\0b")


def test_closing_ends_a_running_command(workspace: Workspace) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            workspace.execute(sleep(16), 600)
        except WorkspaceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: is_alive(sleep(16)))
    workspace.close()
    thread.join(15)
    assert not thread.is_alive()
    assert "it is closed" in str(errors[0])
    assert wait_until(lambda: not is_alive(sleep(16)))
    with pytest.raises(WorkspaceError):
        workspace.execute("true", 30)
    workspace.close()


def test_a_command_that_is_too_long_is_refused(workspace: Workspace) -> None:
    with pytest.raises(ValueError, match="write long texts to files"):
        workspace.execute("#" * 90_001, 30)
    assert workspace.execute("#" * 89_990 + "\necho end", 30).output == "end\n"


def test_two_workspaces_share_no_files_and_no_processes() -> None:
    first, second = LocalWorkspace(), LocalWorkspace()
    first.start(), second.start()
    first.execute(f"echo one >file; {sleep(17)} &", 30)
    second.execute(f"echo two >file; {sleep(18)} &", 30)
    first.close()
    assert second.read_bytes("file") == b"two\n"
    assert is_alive(sleep(18))
    assert not is_alive(sleep(17))
    second.close()
    assert not is_alive(sleep(18))


def test_a_local_workspace_hides_variables_and_removes_its_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    workspace = LocalWorkspace({"EXTRA": "1"})
    workspace.start()
    output = workspace.execute("echo [$OPENAI_API_KEY] $EXTRA; cd; pwd; mktemp", 30).output
    assert output.startswith("[] 1\n")
    root = Path(workspace.cwd).parent
    assert all(line.startswith(str(root)) for line in output.splitlines()[1:])
    workspace.close()
    assert not root.exists()


def test_output_without_end_is_limited_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyrl_agent.workspaces.MAX_OUTPUT_FILE_BYTES", 1 << 20)
    workspace = LocalWorkspace()
    workspace.start()
    result = workspace.execute("yes", 20)
    workspace.close()
    assert result.status not in (0, None)


def test_an_image_that_does_not_exist_is_an_error_that_names_it(docker: str) -> None:
    workspace = ContainerWorkspace("none", "/testbed", {"executable": docker})
    with pytest.raises(WorkspaceError, match=r"container of none did not start.*Unable to find image"):
        workspace.start()
    workspace.close()


@pytest.mark.parametrize("kind", ["stand-in", "podman"])
def test_the_startup_file_of_a_container_is_for_commands_only(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    is_podman = kind == "podman"
    image = request.getfixturevalue("podman_image") if is_podman else str(tmp_path / "image")
    executable = "podman" if is_podman else request.getfixturevalue("docker")
    startup = "/root/.bashrc" if is_podman else str(tmp_path / "startup")
    workspace = ContainerWorkspace(image, "/testbed", {"executable": executable, "env": {"BASH_ENV": startup}})
    workspace.start()
    workspace.execute(f"echo x=1 >{startup}", 30)
    assert workspace.execute("echo [$x]", 30).output == "[1]\n"
    workspace.execute(f"echo 'exit 3' >{startup}", 30)
    assert workspace.execute("true", 30).status == 3
    workspace.close()


def test_other_environments_of_mini_swe_agent_are_refused() -> None:
    with pytest.raises(ValueError, match="environment_class='local' must be docker or singularity"):
        ContainerWorkspace("x", "/", {"environment_class": "local"})


SINGULARITY = """#!/bin/bash
case "$1" in
build) cp -r "${4#docker://}" "$3" ;;
*) eval "folder=\\${$(($# - 3))}"; cd "$folder" && exec bash -c "${@: -1}" ;;
esac
"""


def test_singularity_is_called_as_mini_swe_agent_does(docker: str, tmp_path: Path) -> None:
    executable = tmp_path / "singularity"
    executable.write_text(SINGULARITY, encoding="utf-8")
    executable.chmod(0o755)
    settings = {"environment_class": "singularity", "executable": str(executable)}
    workspace = ContainerWorkspace(str(tmp_path / "image"), str(tmp_path / "work"), settings)
    workspace.start()
    workspace.write_bytes("a", b"x")
    assert workspace.execute("cat a; exit 3", 30) == CommandResult("x", 3)
    assert workspace.execute(sleep(27), 1).status is None
    workspace.close()
    with pytest.raises(WorkspaceError):
        workspace.execute("true", 30)


async def test_a_container_that_does_not_start_in_time_is_an_error_and_leaves_nothing(
    docker: str, tmp_path: Path
) -> None:
    workspace = ContainerWorkspace("hangs", "/testbed", {"executable": docker, "pull_timeout": 2})
    with pytest.raises(WorkspaceError, match=r"did not start within 0.5 s"):
        await start_workspace(workspace, 0.5, lambda _: None)
    assert wait_until(lambda: not any(thread.name == "workspace" for thread in threading.enumerate()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docker", "image"]


async def test_a_workspace_that_starts_after_it_was_closed_is_released(docker: str, tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(ContainerWorkspace):
        def _start(self) -> None:
            release.wait()
            super()._start()

    workspace = Slow(str(tmp_path / "image"), "/testbed", {"executable": docker})
    start = asyncio.create_task(start_workspace(workspace, 60, lambda _: None))
    await asyncio.sleep(0.05)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    release.set()
    assert wait_until(lambda: not any(thread.name == "workspace" for thread in threading.enumerate()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docker", "image"]


async def test_cancellation_closes_an_open_workspace() -> None:
    workspace = LocalWorkspace()

    async def use() -> None:
        async with open_workspace(workspace, 30, lambda _: None):
            await in_thread(lambda: workspace.execute(sleep(19), 600))

    task = asyncio.create_task(use())
    assert await asyncio.to_thread(wait_until, lambda: is_alive(sleep(19)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not is_alive(sleep(19))
    assert not Path(workspace.cwd).exists()


def test_no_container_remains(podman_image: str) -> None:
    listed = subprocess.run(
        ["podman", "ps", "-a", "--filter", f"ancestor={podman_image}", "-q"], capture_output=True, check=True
    )
    assert listed.stdout == b""
