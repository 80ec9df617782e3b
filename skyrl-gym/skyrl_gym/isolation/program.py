"""Run an untrusted Python program within limits, and return its output or return value. Cleans up files and processes.

    results = run_program(source, [Stdin("3 4\\n")])   # yields a result per run, as soon as it ends

There are three levels of isolation. Each limits time, output and files. On Linux, each also limits memory and
processes, and refuses network access and signals to other processes. At `namespaces` (Linux, where users may create
them), the program sees only its own processes, Python, the system's libraries and an empty folder in memory. At
`landlock` (Linux 5.13 or newer), it can open only the same files and an empty folder. At `limits`, it can read and
write what its user can. If the trainer is root, the program runs as a separate user at `landlock` and `limits`. No
level is a virtual machine: the kernel is shared.
"""

import json
import logging
import math
import os
import secrets
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import IO, Any, Literal

from skyrl_gym.error import ToolFailure
from skyrl_gym.isolation.cgroup import memory_cgroup
from skyrl_gym.isolation.files import clear_folder
from skyrl_gym.isolation.landlock import landlock_version
from skyrl_gym.isolation.namespaces import WORK_DIR
from skyrl_gym.isolation.processes import SESSION, all_processes, is_running, members
from skyrl_gym.isolation.seccomp import has_filter
from skyrl_gym.isolation.warden import READY

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parents[1]
BOOT = """
import sys, types
for name, folder in (("skyrl_gym", sys.argv[1]), ("skyrl_gym.isolation", sys.argv[1] + "/isolation")):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [folder]
sys.path += sys.argv[2:]
from skyrl_gym.isolation.warden import main
main()
"""
"""Imports only the warden, not its parent packages: this runs once per program, so startup time matters."""
START_SECONDS = 20.0  # for Python to start on a busy machine
KILL_SECONDS = 0.01  # for killed processes to exit
EXIT_SECONDS = 0.2  # for a finished warden to exit
GRACE_SECONDS = 15.0  # for the warden to end a run that has reached its time limit
N_TRIALS, TRIAL_SECONDS = 3, 0.2  # and seconds between them, before a level counts as unsupported
MARK = "SKYRL_PROGRAM"

Level = Literal["namespaces", "landlock", "limits"]
Isolation = Literal["best", "namespaces", "limits"]
"""Values of the setting `isolation`, with the levels they accept: `best` accepts `namespaces` and `landlock`,
`namespaces` only that level, and `limits` all levels. The first level in this order that the machine supports is used.
"""
End = Literal["exit", "time", "memory", "disk", "processes", "output", "lost"]

_slots = BoundedSemaphore(os.cpu_count() or 1)  # more programs would only slow each other down


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of one run."""

    seconds: float = 10.0  # of wall time
    cpu_seconds: float = math.inf  # of all processes together
    memory_bytes: int = 1 << 30  # of all processes together
    n_processes: int = 16
    output_bytes: int = 1 << 20  # of each stream
    file_bytes: int = 16 << 20  # of each file
    disk_bytes: int = 64 << 20  # of all files together

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0 or (value == math.inf and name != "cpu_seconds"):
                raise ValueError(f"the limit {name}={value} of a program must be a positive number")


@dataclass(frozen=True, slots=True)
class Stdin:
    """A run of the whole program with `text` as standard input.

    With `ignores_exit_status`, a program that calls `sys.exit` succeeds whatever the status. An exception still fails.
    """

    text: str = ""
    ignores_exit_status: bool = False


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A run that calls `name`, a function of the program or a method of its class `Solution`, with JSON arguments."""

    name: str
    args: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a run. `end` is `exit`, the limit that was hit, or `lost` if the program killed its warden."""

    end: End
    status: int | None = None  # exit status; if negative, the signal
    stdout: str = ""
    stderr: str = ""
    result: str = ""  # the return value of a called function, as JSON
    seconds: float = 0.0  # of wall time
    cpu_seconds: float = 0.0

    @property
    def is_success(self) -> bool:
        """True if the run ended by itself without an error."""
        return self.end == "exit" and self.status == 0

    @property
    def value(self) -> Any:
        """The return value of a called function.

        Raises:
            ValueError: there is none, or it is not JSON.
        """
        return json.loads(self.result)


def run_program(
    source: str,
    runs: Sequence[Stdin | FunctionCall],
    limits: ProgramLimits | None = None,
    level: Level | None = None,
    prelude: str = "",
) -> Generator[ProgramResult]:
    """Yield each run's result as soon as it ends. Each run is a separate process, so failures do not stop later runs.

    `prelude` is trusted code that runs first and defines names, e.g. imports, for the program. Close the iterator to
    stop early. At most one program per core runs at a time, so this call may block.

    Raises:
        OSError: no process can be started, or `level` is None and this machine supports only `limits`.
        ToolFailure: the process could not be isolated, so the program was never run.
    """
    limits = limits or ProgramLimits()
    level = level or level_for("best")
    with _slots, _folder() as folder, memory_cgroup(limits.memory_bytes + limits.disk_bytes) as cgroup:
        job = _describe_job(source, runs, limits, level) | {"prelude": prelude, "folder": folder, "cgroup": cgroup}
        n_lost = len(runs)
        with _warden(job) as (process, log), closing(_lines(process, 1 + len(runs), limits)) as lines:
            if next(lines, b"") != READY.encode():
                raise ToolFailure(f"a program could not be isolated: {log()}")
            for line in lines:
                n_lost -= 1
                yield _parse_result(line)
            if n_lost:
                logger.info("a program killed its warden: %s", log())
        for _ in range(n_lost):
            yield ProgramResult("lost")


def run_once(
    source: str, stdin: str = "", limits: ProgramLimits | None = None, level: Level | None = None
) -> ProgramResult:
    """Run a program once and return the result."""
    (result,) = run_program(source, [Stdin(stdin)], limits, level)
    return result


def isolation_level() -> Level:
    """Return the best level of this machine. The first call tries the levels and caches the result."""
    return level_for("limits")


def level_for(isolation: Isolation) -> Level:
    """Return the level for the value of the setting `isolation`.

    Raises:
        OSError: this machine does not support a level that the setting accepts.
    """
    problem = _namespace_problem()
    if problem is None:
        return "namespaces"
    if isolation == "namespaces":
        raise OSError(
            f"isolation={isolation}, but this machine cannot create namespaces for programs ({problem}). Allow users "
            "to create namespaces, or set isolation=best"
        )
    if _landlock_problem() is None:
        return "landlock"
    if isolation == "best":
        raise OSError(
            f"isolation={isolation}, but this machine cannot isolate model-written programs from your files and "
            f"processes ({problem}; {_landlock_problem()}). Use Linux 5.13 or newer with Landlock, or allow users "
            "to create namespaces. To run such programs anyway, with limits on time and memory alone, set "
            "environment.skyrl_gym.<env_class>.isolation=limits"
        )
    _warn_about_limits()
    return "limits"


@cache
def _namespace_problem() -> str | None:
    """Return why programs cannot run in namespaces here, or None if they can."""
    return _find_problem("namespaces")


@cache
def _landlock_problem() -> str | None:
    """Return why Landlock cannot confine programs here, or None if it can."""
    if landlock_version() == 0:
        return "the kernel has no Landlock"
    if not has_filter():
        return f"no filter of system calls for {sys.platform} on {os.uname().machine}"
    return _find_problem("landlock")


@cache
def _warn_about_limits() -> None:
    logger.warning(
        "isolation=limits: model-written programs can read and write the files of the user who runs them (see "
        "docs/guides/included-environments.md#sandboxing)"
    )


def _find_problem(level: Level) -> str | None:
    """Return why an empty program fails at this level, or None if it succeeds."""
    reason = ""
    for _ in range(N_TRIALS):
        try:
            result = run_once("", level=level)
        except ToolFailure as failure:
            reason = str(failure)
        else:
            if result.is_success:
                return None
            reason = f"a program that does nothing ended with {result.end}, status {result.status}"
        time.sleep(TRIAL_SECONDS)
    return reason


def _describe_job(
    source: str, runs: Sequence[Stdin | FunctionCall], limits: ProgramLimits, level: Level
) -> dict[str, Any]:
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_libraries()]
    return {
        "source": source,
        "runs": [
            {"stdin": run.text, "ignores_exit_status": run.ignores_exit_status}
            if isinstance(run, Stdin)
            else {"call": run.name, "args": run.args}
            for run in runs
        ],
        "limits": asdict(limits),
        "level": level,
        "python_folders": [os.path.realpath(path) for path in python],
    }


def _libraries() -> list[str]:
    """Return the folders of installed packages."""
    return [path for path in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))) if path]


@contextmanager
def _folder() -> Iterator[str]:
    folder = os.path.realpath(tempfile.mkdtemp(prefix="skyrl-program-"))
    try:
        yield folder
    finally:
        clear_folder(folder)
        os.rmdir(folder)


@contextmanager
def _warden(job: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Start the process that runs the job. Yield it and a function that returns the last line of its error output.

    The process and all its descendants are killed afterwards.
    """
    mark = secrets.token_hex(16)
    home = WORK_DIR if job["level"] == "namespaces" else job["folder"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", MARK: mark}
    # Threads use up address space, and the program's is limited.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(job).encode("ascii"))
        stdin.seek(0)
        command = [sys.executable, "-I", "-S", "-c", BOOT, str(PACKAGE), *_libraries()]
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
            cwd="/",
            pass_fds=job["cgroup"] or (),
        )
        try:
            yield process, lambda: _tail(stderr)
        except BaseException:  # the caller needs no more results
            process.terminate()
            raise
        finally:
            has_exited = False
            with suppress(subprocess.TimeoutExpired):
                has_exited = process.wait(EXIT_SECONDS) == 0
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if not has_exited:
                _kill_remaining(process.pid, mark)


def _tail(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "no error output"


def _kill_remaining(session: int, mark: str) -> None:
    """Kill process groups left behind by a dead warden: those in its session or with its mark in their environment.

    Killing a whole group is atomic, while killing its processes one by one races with a fork loop.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        found = list(filter(is_running, {*members(SESSION, session), *_find_marked(mark)}))
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        time.sleep(KILL_SECONDS)


def _find_marked(mark: str) -> Iterator[int]:
    variable = f"{MARK}={mark}".encode()
    for pid in all_processes():
        with suppress(OSError):
            if variable in Path(f"/proc/{pid}/environ").read_bytes():
                yield pid


def _lines(process: subprocess.Popen[bytes], n_lines: int, limits: ProgramLimits) -> Generator[bytes]:
    """Yield the warden's lines until it ends, writes too much, or misses a deadline."""
    assert process.stdout is not None
    max_bytes = 8 * 3 * limits.output_bytes + (1 << 16)  # JSON may escape every byte
    read = bytearray()
    deadline = time.monotonic() + START_SECONDS + limits.seconds + GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while n_lines and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            read += chunk
            if not chunk or len(read) > max_bytes:
                return
            if b"\n" not in chunk:  # a long line arrives in many chunks
                continue
            while (end := read.find(b"\n")) >= 0:
                yield bytes(read[:end])
                del read[: end + 1]
                n_lines -= 1
                deadline = time.monotonic() + limits.seconds + GRACE_SECONDS


def _parse_result(line: bytes) -> ProgramResult:
    """Parse a line from the warden. Raises ToolFailure if the program could not be confined, so it was never run."""
    try:
        result = json.loads(line)
        if "failure" in result:
            raise ToolFailure(f"a program could not be isolated: {result['failure']}")
        return ProgramResult(**result)
    except (ValueError, TypeError):  # not written by the warden
        return ProgramResult("lost")
