"""What every kind of workspace does with commands and files, and the processes that it must not leave behind."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_kit.processes import find_pids, unique_sleep, wait_for_end
from train_kit.processes import wait_until

from skyrl_agent.workspaces import (
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    CommandResult,
    ContainerWorkspace,
    IsolatedWorkspace,
    LocalWorkspace,
    Workspace,
    WorkspaceError,
    in_thread,
    open_workspace,
)


@pytest.fixture(params=["isolated", "local", "stand-in", "podman"])
def workspace(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    match request.param:
        case "isolated":
            created: Workspace = IsolatedWorkspace()
        case "local":
            created = LocalWorkspace()
        case "stand-in":
            docker = request.getfixturevalue("docker")
            created = ContainerWorkspace(docker.image, "/testbed", {"executable": docker.executable})
        case _:
            created = ContainerWorkspace(request.getfixturevalue("image"), "/testbed", {"executable": "podman"})
    created.start()
    yield created
    created.close()


class TestCommands:
    def test_a_command_starts_in_the_folder_and_returns_its_output_and_exit_status(self, workspace: Workspace) -> None:
        assert workspace.execute("echo out; echo error >&2; exit 3", 30) == CommandResult("out\nerror\n", 3)
        assert workspace.execute("true", 30) == CommandResult("", 0)
        assert workspace.execute("echo 'a\"b' $((1 + 1)) \\\n  'c\nd'", 30) == CommandResult('a"b 2 c\nd\n', 0)
        workspace.execute("cd /tmp; x=1", 30)
        assert workspace.execute("touch here; cat; echo [$x]", 30).output == "[]\n"
        assert workspace.execute("ls", 30).output == "here\n"
        result = workspace.execute(r"printf 'a\377\000\033[1mb\n'; exit 1", 30)
        assert result.status == 1
        assert result.output.replace("\0", "") == "a\ufffd\x1b[1mb\n"

    def test_long_output_keeps_its_beginning_and_its_end(self, workspace: Workspace) -> None:
        result = workspace.execute("echo first; yes | head -c 5000000; echo; echo last", 60)
        assert result.status == 0
        assert result.output.startswith("first\ny\n")
        assert result.output.endswith("\nlast\n")
        assert "[the middle of the output is left out]" in result.output
        assert len(result.output) < MAX_OUTPUT_BYTES + 100

    def test_commands_cannot_break_the_workspace(self, workspace: Workspace) -> None:
        assert workspace.execute("kill -KILL $PPID; kill -KILL $$", 30).status not in (0, None)
        assert workspace.execute("echo alive", 30).output == "alive\n"
        workspace.execute('rm -rf "$PWD"', 30)
        result = workspace.execute("echo here", 30)
        if isinstance(workspace, IsolatedWorkspace):  # its folder is a mount
            assert result == CommandResult("here\n", 0)
        else:
            assert result.status != 0
            assert "cd" in result.output

    def test_a_command_that_is_too_long_is_refused(self, workspace: Workspace) -> None:
        with pytest.raises(ValueError, match="write long texts to files"):
            workspace.execute("#" * 90_001, 30)
        assert workspace.execute("#" * 89_990 + "\necho end", 30).output == "end\n"


class TestProcesses:
    """`unique_sleep` sleeps for over an hour: a command that waits for one runs into the time limit of the test."""

    def test_a_command_that_hangs_is_killed_with_its_children(self, workspace: Workspace) -> None:
        child, command = unique_sleep(), unique_sleep()
        assert workspace.execute(f"echo before; {child} & {command}", 1) == CommandResult("before\n", None)
        wait_for_end(child, command)
        assert workspace.execute("echo after", 30).output == "after\n"

    @pytest.mark.parametrize("command", ["trap '' TERM INT HUP; {sleep}; {sleep}", "exec {sleep}"])
    def test_a_command_cannot_ignore_its_time_limit(self, workspace: Workspace, command: str) -> None:
        sleep = unique_sleep()
        assert workspace.execute(command.format(sleep=sleep), 1).status is None
        wait_for_end(sleep)

    def test_background_processes_do_not_delay_commands_and_end_with_the_workspace(self, workspace: Workspace) -> None:
        child, daemon = unique_sleep(), unique_sleep()
        assert workspace.execute(f"{child} & setsid {daemon} & echo started", 30) == CommandResult("started\n", 0)
        if not isinstance(workspace, IsolatedWorkspace):  # there, they end with the command
            wait_until(lambda: find_pids(child) and find_pids(daemon))
            workspace.close()
        wait_for_end(child, daemon)

    def test_closing_ends_a_running_command(self, workspace: Workspace) -> None:
        sleep, errors = unique_sleep(), []

        def run() -> None:
            try:
                workspace.execute(sleep, 600)
            except WorkspaceError as error:
                errors.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: find_pids(sleep))
        workspace.close()
        thread.join()
        assert "it is closed" in errors[0]
        wait_for_end(sleep)
        with pytest.raises(WorkspaceError):
            workspace.execute("true", 30)
        workspace.close()


class TestFiles:
    def test_files_are_read_as_written_or_errors_name_the_path(self, workspace: Workspace) -> None:
        for content in (b"", b"\r\n\0\xff", "ü\n".encode() * 60_000):
            for path in ("a folder/it's -x", "-n"):
                workspace.write_bytes(path, content)
                assert workspace.read_bytes(path) == content
            assert workspace.execute('cat "a folder/it\'s -x" | wc -c', 30).output.strip() == str(len(content))
        workspace.execute(f"mkdir d; mkfifo pipe; head -c {MAX_FILE_BYTES + 1} /dev/zero >large", 60)
        for path, message in (
            ("d", "d is a directory"),
            ("none", "none does not exist"),
            ("/dev/zero", "is not a regular file"),
            ("pipe", "is not a regular file"),
            ("large", "more than 16 MiB"),
            ("a\0b", "is not a path"),
        ):
            with pytest.raises(OSError, match=message):
                workspace.read_bytes(path)
        with pytest.raises(OSError, match="cannot be written"):
            workspace.write_bytes("d", b"x")


class TestLocalWorkspace:
    def test_two_workspaces_share_no_files_and_no_processes(self) -> None:
        first, second = LocalWorkspace(), LocalWorkspace()
        sleeps = unique_sleep(), unique_sleep()
        for workspace, sleep in zip((first, second), sleeps, strict=True):
            workspace.start()
            workspace.execute(f"echo {sleep} >file; {sleep} &", 30)
        first.close()
        assert second.read_bytes("file").decode().strip() == sleeps[1]
        assert [len(find_pids(sleep)) for sleep in sleeps] == [0, 1]
        second.close()
        assert not find_pids(sleeps[1])

    def test_it_hides_variables_and_removes_its_folders(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        workspace = LocalWorkspace({"EXTRA": "1"})
        workspace.start()
        output = workspace.execute("echo [$OPENAI_API_KEY] $EXTRA; cd; pwd; mktemp", 30).output
        assert output.startswith("[] 1\n")
        root = Path(workspace.cwd).parent
        assert all(line.startswith(str(root)) for line in output.splitlines()[1:])
        workspace.close()
        assert not root.exists()

    def test_output_without_end_is_limited_on_disk(
        self, local_workspace: LocalWorkspace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("skyrl_agent.workspaces.MAX_OUTPUT_FILE_BYTES", 1 << 20)
        assert local_workspace.execute("yes", 60).status not in (0, None)

    async def test_cancellation_closes_an_open_workspace(self) -> None:
        workspace, sleep = LocalWorkspace(), unique_sleep()

        async def use() -> None:
            async with open_workspace(workspace, 30, lambda _: None):
                await in_thread(lambda: workspace.execute(sleep, 600))

        task = asyncio.create_task(use())
        await asyncio.to_thread(wait_until, lambda: find_pids(sleep))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not find_pids(sleep)
        assert not Path(workspace.cwd).exists()


class TestIsolation:
    def test_a_link_that_a_command_leaves_does_not_lead_a_later_mount_out_of_the_workspace(
        self, tmp_path: Path
    ) -> None:
        tools, outside = tmp_path / "tools", tmp_path / "outside"
        for folder in (tools, outside):
            folder.mkdir()
        (tools / "a").write_text("x")
        workspace = IsolatedWorkspace(readable=[str(tools)])
        workspace.start()
        assert (
            workspace.execute(f"cat {tools}/a; echo y >{tools}/a || ls {outside} || echo hidden", 30).output[:1] == "x"
        )
        assert (tools / "a").read_text() == "x"
        top = "/".join(tools.parts[1:3])
        workspace.run(f"mv /{top} /tmp/moved; ln -s {outside} /{top}")
        with pytest.raises(WorkspaceError, match="leads out of the workspace"):
            workspace.run("true")
        assert list(outside.iterdir()) == []
        workspace.close()
