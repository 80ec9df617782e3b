"""Run an untrusted Python program within limits, and return what it prints or returns. It leaves nothing behind.

    results = run_program(source, [Stdin("3 4\\n")])   # yields a result per run, as soon as it ends

There are two levels of isolation. At `namespaces` (Linux, where users may create them), the program has its own
processes, no network and no devices, and sees only Python, the system's libraries and an empty folder in memory. At
`limits` (elsewhere), it has limits on time, memory, output and files, an empty folder, and none of our environment
variables; on Linux it has no sockets and no signals; everything it starts is killed. But it can read and write what the
user who trains can read and write. Neither level is a virtual machine: the kernel is shared.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import selectors
import shutil
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
from skyrl_gym.isolation.namespaces import WORK_DIR

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
"""Imports the warden alone, without the packages around it, because it starts once per program."""
START_SECONDS = 20.0  # for Python to start on a busy machine
EXIT_SECONDS = 0.2  # for a finished warden to exit
GRACE_SECONDS = 5.0  # for the warden to end a run that has reached its time limit
N_TRIALS, TRIAL_SECONDS = 3, 0.2  # before giving up on namespaces
MARK = "SKYRL_PROGRAM"
READY = b"ready"  # the warden's first line

Level = Literal["namespaces", "limits"]
Demand = Literal["best", "namespaces"]
"""Values of the setting `isolation`: the best level of the machine, or that one."""
End = Literal["exit", "time", "memory", "processes", "output", "lost"]

_slots = BoundedSemaphore(os.cpu_count() or 1)  # more programs would only slow each other down


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one run."""

    seconds: float = 10.0  # of wall time
    cpu_seconds: float = math.inf  # of all processes together
    memory_bytes: int = 1 << 30  # of all processes together
    n_processes: int = 16
    output_bytes: int = 1 << 20  # of each stream
    file_bytes: int = 16 << 20  # of each file
    disk_bytes: int = 64 << 20  # of all files together, at the level `namespaces`

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"the limit {name}={getattr(self, name)} of a program must be positive")


@dataclass(frozen=True, slots=True)
class Stdin:
    """A run of the whole program, which reads `text`.

    With `ignores_exit_status`, a program that calls `sys.exit` succeeds whatever the status; an exception still fails.
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
    """The result of a run. `end` is `exit`, the limit that it hit, or `lost` if the program killed its warden."""

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
    limits: Limits | None = None,
    level: Level | None = None,
    prelude: str = "",
) -> Generator[ProgramResult]:
    """Yield the result of each run as soon as it ends. Each run is a separate process; a failure does not end the
    others.

    `prelude` is trusted code that runs first and defines names, e.g. imports, for the program.
    Close the iterator to stop early. At most one program per core runs at a time; others wait.

    Raises:
        OSError: no process can be started.
        ToolFailure: the process could not be isolated, so the program was never run.
    """
    limits = limits or Limits()
    with _slots, _folder() as folder:
        job = _job(source, runs, limits, folder, level or isolation_level()) | {"prelude": prelude}
        n_lost = len(runs)
        with _warden(job) as (process, log), closing(_lines(process, 1 + len(runs), limits)) as lines:
            if next(lines, b"") != READY:
                raise ToolFailure(f"a program could not be isolated: {log()}")
            for line in lines:
                n_lost -= 1
                yield _parse_result(line)
            if n_lost:
                logger.info("a program killed its warden: %s", log())
        for _ in range(n_lost):
            yield ProgramResult("lost")


def run_once(source: str, stdin: str = "", limits: Limits | None = None, level: Level | None = None) -> ProgramResult:
    """Run a program once and return the result."""
    (result,) = run_program(source, [Stdin(stdin)], limits, level)
    return result


def isolation_level() -> Level:
    """Return the best level of this machine, found out by trying once per process."""
    reason = _namespace_problem()
    return "namespaces" if reason is None else "limits"


def level_for(demand: Demand) -> Level:
    """Return the level for the value of the setting `isolation`.

    Raises:
        OSError: it demands `namespaces`, which this machine does not support.
    """
    if demand == "namespaces" and (reason := _namespace_problem()) is not None:
        raise OSError(
            f"isolation={demand}, but programs cannot be isolated on this machine ({reason}). Allow users to create "
            "namespaces, or set isolation=best"
        )
    return isolation_level()


@cache
def _namespace_problem() -> str | None:
    """Return the reason why programs cannot run in namespaces here, or None if they can."""
    reason = ""
    for _ in range(N_TRIALS):
        try:
            result = run_once("", level="namespaces")
        except ToolFailure as failure:
            reason = str(failure)
        else:
            if result.is_success:
                return None
            reason = f"a program that does nothing ended with {result.end}, status {result.status}"
        time.sleep(TRIAL_SECONDS)
    logger.warning(
        "Programs that models write run within limits, but are not isolated from the files and processes of this user: "
        "%s",
        reason,
    )
    return reason


def _job(
    source: str, runs: Sequence[Stdin | FunctionCall], limits: Limits, folder: str, level: Level
) -> dict[str, Any]:
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_libraries()]
    return {
        "source": source,
        "prelude": "",
        "runs": [
            {"stdin": run.text, "ignores_exit_status": run.ignores_exit_status}
            if isinstance(run, Stdin)
            else {"call": run.name, "args": run.args}
            for run in runs
        ],
        "limits": asdict(limits),
        "folder": folder,
        "level": level,
        "python": [os.path.realpath(path) for path in python],
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
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _warden(job: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Start the process that runs the job; yield it and a function that returns the last line of its error output.

    The process and all its descendants are killed afterwards.
    """
    mark = secrets.token_hex(16)
    home = WORK_DIR if job["level"] == "namespaces" else job["folder"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", MARK: mark}
    environment |= {
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }  # threads take address space, which is limited
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
        )
        try:
            yield process, lambda: _tail(stderr)
        finally:
            has_exited = _exits_cleanly(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if not has_exited:
                _kill_marked(mark)


def _exits_cleanly(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a finished warden exits by itself with status 0."""
    try:
        return process.wait(EXIT_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False


def _tail(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "no error output"


def _kill_marked(mark: str) -> None:
    """Kill processes that have left the process group and whose warden is gone."""
    variable = f"{MARK}={mark}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _lines(process: subprocess.Popen[bytes], n_lines: int, limits: Limits) -> Generator[bytes]:
    """Yield the lines of the warden until it takes too long."""
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
    try:
        return ProgramResult(**json.loads(line))
    except (ValueError, TypeError):  # not written by the warden
        return ProgramResult("lost")
