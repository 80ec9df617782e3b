"""Agents' workspaces: a folder and a shell, isolated on this machine, in a container, or on this machine as it is."""

import asyncio
import base64
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from skyrl_agent.leases import MARK, Lease, kill_marked, lease_folder, new_name
from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation import relay
from skyrl_gym.isolation.command import NOT_ISOLATED, PORT, Isolation, isolate_command

T = TypeVar("T")
W = TypeVar("W", bound="Workspace")

MAX_OUTPUT_BYTES = 30_000  # per command. The first and the last half are kept.
MAX_OUTPUT_FILE_BYTES = 4 << 30  # per file that a command writes, so that endless output does not fill the disk
MAX_FILE_BYTES = 16 << 20  # per file that is read or written as a whole
MAX_PRINTED_BYTES = 4 * MAX_FILE_BYTES  # of a script. Its command can print past the file for its output
MAX_COMMAND_BYTES = 90_000  # Linux allows 128 KiB for an argument, and base64 adds a third
CHUNK_BYTES = 45_000
FILE_TIMEOUT_S = 60.0
GRACE_S = 15.0  # for a command that reached its limit to be killed and its output to be read
TERMINATE_S = 10.0  # for an isolated process to end everything in its namespace
RELAY_FILE = Path(relay.__file__).name
RELAY = "/run/skyrl"  # folder in a container with the socket and the relay

SCRIPT = """exec 2>/dev/null
output=$(mktemp) || exit 1
started=$(date +%s)
(cd {cwd} && ulimit -f {max_file_kib} && exec timeout -s KILL {limit_s} \
bash -c "$(printf %s {command} | base64 -d)") </dev/null >"$output" 2>&1
echo "$? $(($(date +%s) - started)) $(wc -c <"$output")"
if [ "$(wc -c <"$output")" -le {max_bytes} ]; then cat "$output"; else
head -c {half} "$output"; printf '\\n[the middle of the output is left out]\\n'; tail -c {half} "$output"; fi
rm -f "$output"
"""
"""Script: run a command in its own process group with a time limit, and print its status, seconds, size and output.

The output goes to a file, not a pipe: a background process that keeps a pipe open would keep the command from
returning.
"""

READ = """if [ -d {path} ]; then exit 101; elif [ ! -e {path} ]; then exit 102; elif [ ! -f {path} ]; then exit 103
elif [ "$(wc -c <{path})" -gt {max_bytes} ]; then exit 104; fi; base64 <{path}"""


class WorkspaceError(ToolFailure):
    """The workspace failed to start or to respond. The model is not at fault."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command, e.g. `CommandResult("3 passed\n", 0)`."""

    output: str  # stdout and stderr, with the middle cut out if long
    status: int | None  # None: killed at its time limit


@dataclass(frozen=True, slots=True)
class Launch:
    """The process on this machine that runs a program of a workspace, as the arguments of `subprocess.Popen`."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = "/"
    stdin: bytes = b""


class Workspace(ABC):
    """A folder with a shell. It exists from `start` to `close`, or until another process finds that this one has died.

    Methods block and may be called from any thread. `close` ends running commands. Each command runs in a new shell:
    variables and `cd` do not survive it, background processes do, except in an `IsolatedWorkspace`.
    """

    home: str
    """Home folder of programs, outside of `cwd`."""

    socket: Path | None = None
    """Unix socket that programs reach at 127.0.0.1:8000. None: they reach this machine's ports."""

    base_tree: str | None = None
    """Git tree of `cwd` when the agent started. See `tasks.patches`."""

    def __init__(self, cwd: str) -> None:
        """Set the working directory of commands."""
        self.cwd = cwd
        self._is_closed = False

    def start(self) -> None:
        """Create the workspace.

        Raises:
            WorkspaceError: the workspace does not start, or `close` was called meanwhile.
        """
        self._start()
        if self._is_closed:
            self._release()
            raise WorkspaceError("the workspace was closed while it started")

    def close(self) -> None:
        """Release the workspace and end its processes. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def execute(self, command: str, timeout_s: float, max_bytes: int = MAX_OUTPUT_BYTES) -> CommandResult:
        """Run a command with bash. At the time limit, its process group is killed.

        Raises:
            ValueError: the command is too long.
            WorkspaceError: the workspace does not respond.
        """
        encoded = command.encode("utf-8", "surrogateescape")
        if len(encoded) > MAX_COMMAND_BYTES:
            raise ValueError(
                f"the command has {len(encoded):,} bytes, more than {MAX_COMMAND_BYTES:,}; write long texts to files"
            )
        limit_s = max(1, math.ceil(timeout_s))
        script = SCRIPT.format(
            cwd=shlex.quote(self.cwd),
            max_file_kib=MAX_OUTPUT_FILE_BYTES >> 10,
            limit_s=limit_s,
            command=base64.b64encode(encoded).decode("ascii"),
            max_bytes=max_bytes,
            half=max_bytes // 2,
        )
        printed, script_status = self._run(script, limit_s + GRACE_S)
        header, _, output = printed.partition("\n")
        if (match := re.fullmatch(r"(\d+) (\d+) \d+", header)) is None:
            if not self._is_closed and not 0 <= script_status <= 128:  # the command killed all shells
                return CommandResult("", script_status)
            reason = "it is closed" if self._is_closed else f"status {script_status}: {printed[:500]}"
            raise WorkspaceError(f"a command could not run in the workspace: {reason}")
        status, seconds = map(int, match.groups())
        is_late = status == 128 + signal.SIGKILL and seconds >= limit_s
        return CommandResult(output, None if is_late else status)

    def run(self, command: str, timeout_s: float = FILE_TIMEOUT_S, max_bytes: int = MAX_OUTPUT_BYTES) -> str:
        """Run an internal command and return its output. Raises WorkspaceError if it fails."""
        result = self.execute(command, timeout_s, max_bytes)
        if result.status != 0:
            problem = f"took longer than {timeout_s:g} s" if result.status is None else f"status {result.status}"
            raise WorkspaceError(f"{command[:200]!r} failed in the workspace: {problem}: {result.output[-500:]}")
        return result.output

    def read_bytes(self, path: str) -> bytes:
        """Return a file's content. Relative paths start at `cwd`.

        Raises:
            OSError: the file does not exist, is not a regular file, or is larger than 16 MiB.
        """
        command = READ.format(path=quote_path(path), max_bytes=MAX_FILE_BYTES)
        result = self.execute(command, FILE_TIMEOUT_S, 2 * MAX_FILE_BYTES)
        match result.status:
            case 0:
                return base64.b64decode(result.output)
            case 101:
                raise IsADirectoryError(f"{path} is a directory")
            case 102:
                raise FileNotFoundError(f"{path} does not exist")
            case 103:
                raise OSError(f"{path} is not a regular file")
            case 104:
                raise OSError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
        raise OSError(f"{path} cannot be read: {result.output[-500:]}")

    def write_bytes(self, path: str, content: bytes) -> None:
        """Write a file, creating its folder. Relative paths start at `cwd`. Raises OSError if it cannot be written."""
        command, quoted = f'mkdir -p -- "$(dirname -- {quote_path(path)})" && ', quote_path(path)
        for start in range(0, max(1, len(content)), CHUNK_BYTES):
            chunk = base64.b64encode(content[start : start + CHUNK_BYTES]).decode("ascii")
            command += f"printf %s {chunk} | base64 -d {'>>' if start else '>'}{quoted}"
            result = self.execute(command, FILE_TIMEOUT_S)
            if result.status != 0:
                raise OSError(f"{path} cannot be written: {result.output[-500:]}")
            command = ""

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder of this machine to the absolute path `target`, with the permissions of its files."""
        for path in sorted(source.rglob("*")):
            if path.is_file():
                name = f"{target}/{path.relative_to(source)}"
                self.write_bytes(name, path.read_bytes())
                self.run(f"chmod {path.stat().st_mode & 0o777:o} {quote_path(name)}")

    @abstractmethod
    def end_programs(self) -> None:
        """Kill every process of the workspace. Its files remain."""

    @abstractmethod
    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Return the process that runs a program in `cwd` with the additional variables `env`."""

    @abstractmethod
    def _start(self) -> None:
        """Create the workspace."""

    @abstractmethod
    def _release(self) -> None:
        """End all processes and remove the workspace, in whatever state it is. May be called twice."""

    @abstractmethod
    def _run(self, script: str, timeout_s: float) -> tuple[str, int]:
        """Run a bash script. Return its output and exit status. Raises WorkspaceError if it takes too long."""


def quote_path(path: str) -> str:
    """Quote a path for the shell. A leading hyphen is not an option. Raises OSError if it is not a path."""
    if "\0" in path or not path:
        raise OSError(f"{path!r} is not a path")
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


class ContainerWorkspace(Workspace):
    """A container in one of mini-swe-agent's environments: Docker or Singularity.

    Closing a Docker container ends all its processes. Singularity ends processes with their command. A command that is
    running when the workspace is closed ends at its time limit.
    """

    home = "/root"

    def __init__(
        self, image: str, cwd: str, environment: Mapping[str, Any] | None = None, *, has_socket: bool = False
    ) -> None:
        """Configure the container that `start` creates.

        Args:
            image: the container's image.
            cwd: the working directory of commands. It is created if the image lacks it.
            environment: settings of `minisweagent.environments`: environment_class (docker or singularity), executable
                (e.g. podman), run_args, env, pull_timeout, container_timeout, …
            has_socket: programs of the container reach a Unix socket at `socket`. Docker and Podman only.

        Raises:
            ValueError: `environment_class` has any other value.
        """
        super().__init__(cwd)
        self._image = image
        self._lease: Lease | None = None
        self._name = f"skyrl-agent-{new_name()}"
        folder = lease_folder() / self._name
        self._environment: Any = None
        settings: dict[str, Any] = {"environment_class": "docker", **(environment or {})}
        self._is_docker = settings["environment_class"] == "docker"
        if self._is_docker:
            self._executable = settings.get("executable") or os.environ.get("MSWEA_DOCKER_EXECUTABLE", "docker")
            ours = ["--name", self._name, "--stop-signal", "KILL"]  # the last --name counts
            if has_socket:
                self.socket = folder / "model.sock"
                ours += ["--volume", f"{folder}:{RELAY}"]
            self._settings = {
                **settings,
                "image": image,
                "executable": self._executable,
                "interpreter": ["bash", "-pc"],  # -p: BASH_ENV is for the commands of agents
                "run_args": [*settings.get("run_args", ["--rm"]), *ours],
            }
        elif settings["environment_class"] == "singularity":
            exec_args = ["--contain", "--cleanenv", "--fakeroot", "--pid"]
            self._settings = {
                "exec_args": exec_args,
                **settings,
                "image": image if "://" in image else f"docker://{image}",
            }
        else:
            raise ValueError(f"environment_class={settings['environment_class']!r} must be docker or singularity")

    def _start(self) -> None:
        os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
        try:
            from minisweagent.environments import get_environment
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "containers need the package mini-swe-agent: pip install './skyrl-agent[swe]' (in your clone of the "
                "repository)"
            ) from error
        logging.getLogger("minisweagent").setLevel(logging.WARNING)  # it logs each command that starts a container
        if self._is_docker:
            self._lease = Lease(self._name, [self._executable, "rm", "--force", "--volumes", self._name])
            shutil.copy(relay.__file__, self._lease.folder)
        try:
            self._environment = get_environment(self._settings)
        except (subprocess.SubprocessError, OSError) as error:
            output = getattr(error, "stderr", None) or ""
            details = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
            raise WorkspaceError(f"the container of {self._image} did not start: {error} {details[-500:]}") from error
        self._run(f"mkdir -p {shlex.quote(self.cwd)}", FILE_TIMEOUT_S)

    def _release(self) -> None:
        environment, self._environment = self._environment, None
        if self._is_docker:
            if environment is not None:
                environment.container_id = None  # or its cleanup starts a second `docker rm` in the background
            if self._lease is not None:
                self._lease.release()
        elif environment is not None:
            environment.cleanup()

    def end_programs(self) -> None:
        """Kill every process but the container's first, and the shell that does it."""
        self._run("kill -KILL -1", FILE_TIMEOUT_S)

    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Return `docker exec`. With a socket, the container needs python3, for the relay.

        Raises:
            WorkspaceError: the container is not one of Docker or Podman.
        """
        if not self._is_docker:
            raise WorkspaceError("programs run in containers of Docker or Podman; set environment_class=docker")
        variables = [part for name, value in env.items() for part in ("-e", f"{name}={value}")]
        through_relay = ("python3", f"{RELAY}/{RELAY_FILE}", f"{RELAY}/model.sock", str(PORT))
        command = (self._executable, "exec", "-w", self.cwd, *variables, self._name)
        return Launch((*command, *(through_relay if self.socket else ()), *argv), os.environ)

    def _run(self, script: str, timeout_s: float) -> tuple[str, int]:
        environment = self._environment
        if environment is None:
            raise WorkspaceError("the container is not running")
        result = environment.execute({"command": script}, cwd="/", timeout=math.ceil(timeout_s))
        if result["exception_info"]:
            raise WorkspaceError(f"the container of {self._image} does not answer: {result['exception_info'][-500:]}")
        return result["output"], result["returncode"]


class _MachineWorkspace(Workspace):
    """Base class for workspaces in a temporary folder of this machine."""

    def __init__(self, cwd: str) -> None:
        super().__init__(cwd)
        self._name = new_name()
        self._root = lease_folder() / self._name
        self._lease: Lease | None = None
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()  # no process starts after `close`

    def _start(self) -> None:
        self._lease = Lease(self._name)
        for name in ("workspace", "home", "tmp"):
            (self._root / name).mkdir()

    def _release(self) -> None:
        with self._lock:
            running = list(self._processes)
        for process in running:
            self.end(process)
        if self._lease is not None:
            self._lease.release()

    def end_programs(self) -> None:
        """Kill every process of the workspace. Its files remain."""
        kill_marked(self._name)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a process with its group."""
        _kill_group(process.pid)

    def _run(self, script: str, timeout_s: float) -> tuple[str, int]:
        launch = self.launch(["bash", "-c", script], {})
        with self._lock:
            if self._is_closed:
                raise WorkspaceError("the workspace is closed")
            process = subprocess.Popen(
                launch.argv,
                cwd=launch.cwd,
                env=launch.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.add(process)
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.end(process)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdout:
                with suppress(BrokenPipeError), process.stdin:  # it has ended already
                    process.stdin.write(launch.stdin)
                output = process.stdout.read(MAX_PRINTED_BYTES)
            if len(output) == MAX_PRINTED_BYTES:
                self.end(process)
            process.wait()
        finally:
            timer.cancel()
            timer.join()
            with self._lock:
                self._processes.discard(process)
        if late.is_set():
            raise WorkspaceError(f"the shell did not return within {timeout_s:g} s")
        if len(output) == MAX_PRINTED_BYTES:
            raise WorkspaceError(f"the shell printed more than {MAX_PRINTED_BYTES >> 20} MiB")
        text = output.decode("utf-8", "replace")
        if process.returncode == NOT_ISOLATED:
            raise WorkspaceError(text.strip())
        return text, process.returncode


class LocalWorkspace(_MachineWorkspace):
    """A temporary folder on this machine. It is NOT a sandbox.

    Commands run as the current user and can read and change everything that this user can. Use it for tests, or for
    models and repositories that you trust. Commands get no environment variables of this process except PATH. `close`
    kills all processes that inherited the workspace's mark in their environment (Linux), and the groups of running
    commands.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """Choose the folder. `env` has extra variables for commands."""
        super().__init__("")
        self.cwd, self.home = str(self._root / "workspace"), str(self._root / "home")
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": self.home,
            "TMPDIR": str(self._root / "tmp"),
            "LANG": "C.UTF-8",
            **(env or {}),
            MARK: self._name,
        }

    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Return the program itself."""
        return Launch(tuple(argv), {**self._env, **env}, self.cwd if os.path.isdir(self.cwd) else str(self._root))


class IsolatedWorkspace(_MachineWorkspace):
    """A temporary folder on this machine in which each command runs isolated, by Linux namespaces.

    A command sees the workspace, its home, `/tmp`, the system's programs and `readable`, but no other file, process,
    user or network address. Every command has a new process namespace, so none of its processes outlives it.
    Memory, processes, files and their number are limited. The kernel is shared.
    """

    home = "/home/agent"

    def __init__(
        self,
        cwd: str = "/workspace",
        readable: Sequence[str] = (),
        path: Sequence[str] = (),
        folders: Sequence[str] = (),
    ) -> None:
        """Choose the folder.

        Args:
            cwd: the working directory that commands see.
            readable: folders of this machine that commands can read, at the same place.
            path: folders to search for programs, before the system's.
            folders: further folders that are empty at first and keep their contents, e.g. /logs.
        """
        super().__init__(cwd)
        self.socket = self._root / "model.sock"
        self._readable, self._path = list(readable), list(path)
        self._writable = {cwd: "workspace", self.home: "home", "/tmp": "tmp"}
        self._writable |= {folder: f"folder{i}" for i, folder in enumerate(folders)}

    @staticmethod
    def check() -> None:
        """Raise WorkspaceError if this machine cannot isolate commands."""
        workspace = IsolatedWorkspace()
        try:
            workspace.start()
            workspace.run("true")
        finally:
            workspace.close()

    def _start(self) -> None:
        super()._start()
        for name in ("root", *(name for name in self._writable.values() if name.startswith("folder"))):
            (self._root / name).mkdir()

    def end_programs(self) -> None:
        """Kill every process of the workspace, and make its folders writable again."""
        super().end_programs()
        for name in self._writable.values():
            (self._root / name).chmod(0o700)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Have a process end everything in its namespace, then kill it."""
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_S)
        super().end(process)

    def upload(self, source: Path, target: str) -> None:
        """Copy a folder of this machine to a path that no command has seen yet."""
        name = f"upload{len(self._writable)}"
        shutil.copytree(source, self._root / name, symlinks=True)
        self._writable[target] = name

    def launch(self, argv: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Return the process that enters the namespaces and runs the program."""
        variables = {
            "PATH": ":".join((*self._path, "/usr/local/bin", "/usr/bin", "/bin")),
            "HOME": self.home,
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            **env,
        }
        user, group = os.geteuid(), os.getegid()
        isolation = Isolation(
            root=str(self._root / "root"),
            writable={inside: str(self._root / name) for inside, name in self._writable.items()},
            cwd=self.cwd,
            readable=self._readable,
            files={
                "/etc/passwd": f"agent:x:{user}:{group}::{self.home}:/bin/bash\n",
                "/etc/group": f"agent:x:{group}:\n",
                "/etc/hosts": "127.0.0.1 localhost\n",
            },
            socket=str(self.socket) if self.socket is not None and self.socket.exists() else None,
            env=variables,
        )
        launch = isolate_command(isolation, argv)
        return Launch(launch.argv, {"PATH": os.defpath, MARK: self._name}, stdin=launch.stdin)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


async def in_thread(function: Callable[[], T], limit_s: float | None = None) -> T:
    """Run a blocking function in a separate daemon thread, and return its result.

    A cancelled or late call is abandoned: its thread ends when the function returns.

    Raises:
        TimeoutError: the function took longer than `limit_s`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(set_outcome: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(lambda: None if future.done() else set_outcome())

    def work() -> None:
        try:
            result = function()
        except SystemExit as error:  # it would end the caller's event loop
            deliver(partial(future.set_exception, RuntimeError(f"it called sys.exit({error.code!r})")))
        except Exception as error:  # noqa: BLE001, the caller gets it
            deliver(partial(future.set_exception, error))
        else:
            deliver(partial(future.set_result, result))

    threading.Thread(target=work, name="workspace", daemon=True).start()
    async with asyncio.timeout(limit_s):
        return await future


async def start_workspace(workspace: W, limit_s: float, prepare: Callable[[W], None]) -> W:
    """Start and prepare a workspace. If that fails, is cancelled or takes too long, the workspace is closed.

    Raises:
        WorkspaceError: it does not start in time.
    """

    def start() -> None:
        workspace.start()
        prepare(workspace)

    try:
        await in_thread(start, limit_s)
    except BaseException as error:
        await in_thread(workspace.close)
        if isinstance(error, TimeoutError):
            raise WorkspaceError(f"the workspace did not start within {limit_s:g} s") from error
        raise
    return workspace


@asynccontextmanager
async def open_workspace(workspace: W, limit_s: float, prepare: Callable[[W], None]) -> AsyncIterator[W]:
    """Start and prepare a workspace, and close it at the end, including on cancellation."""
    await start_workspace(workspace, limit_s, prepare)
    try:
        yield workspace
    finally:
        await in_thread(workspace.close)
