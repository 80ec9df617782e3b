"""Run a Python program that nobody has read: what it prints or returns, within limits, and nothing of it stays.

    outcome = run_program(source, [Stdin("3 4\\n")])   # an outcome for each input, as they come

Two levels, see `isolation_level`. In `namespaces` (Linux, where users may make them) the program has its own
processes, no network, no devices, and sees nothing of the file system but Python, the system's libraries and an empty
folder in memory. In `limits` (elsewhere) there are limits on time, memory, output and files, an empty folder, an
environment without variables of ours, no sockets and no signals on Linux, and everything it starts is killed; but it
can read what the user who trains can read, and write where that user can. Neither is a virtual machine: the kernel is
shared.
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
from skyrl_gym.isolation.namespaces import PLACE

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
"""Imports the warden without what else there is in the packages around it: it starts for every program."""
START_SECONDS = 20.0  # for Python to start on a busy machine
END_SECONDS = 0.2  # for a warden that is done to end
GRACE_SECONDS = 5.0  # for the warden to end a run that it says takes no longer
N_TRIALS, TRIAL_SECONDS = 3, 0.2  # before namespaces are given up
MARK = "SKYRL_PROGRAM"
READY = b"ready"  # the warden's first line

Level = Literal["namespaces", "limits"]
Demand = Literal["best", "namespaces"]
"""What a setting may demand: the best level of the machine, or that one."""
End = Literal["exit", "time", "memory", "processes", "output", "lost"]

_turns = BoundedSemaphore(os.cpu_count() or 1)  # more at once would only slow one another down


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run."""

    seconds: float = 10.0  # by the clock
    cpu_seconds: float = math.inf  # of all its processes
    memory_bytes: int = 1 << 30  # of all its processes
    n_processes: int = 16
    output_bytes: int = 1 << 20  # of each stream
    file_bytes: int = 16 << 20  # of each file
    disk_bytes: int = 64 << 20  # of all files, in `namespaces`

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"the limit {name}={getattr(self, name)} of a program must be positive")


@dataclass(frozen=True, slots=True)
class Stdin:
    """A run of the whole program, which reads `text`."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A run that calls `name`, a function of the program or a method of its class `Solution`, with JSON arguments."""

    name: str
    args: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: `exit`, or the limit it met, or `lost` when the program took its warden along."""

    end: End
    status: int | None = None  # of the exit; negative: the signal
    stdout: str = ""
    stderr: str = ""
    result: str = ""  # JSON of what a called function returned
    seconds: float = 0.0  # by the clock
    cpu_seconds: float = 0.0  # that it computed

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself, without an error."""
        return self.end == "exit" and self.status == 0

    @property
    def value(self) -> Any:
        """What a called function returned.

        Raises:
            ValueError: nothing, or nothing that is JSON.
        """
        return json.loads(self.result)


def run_program(
    source: str,
    runs: Sequence[Stdin | Call],
    limits: Limits | None = None,
    level: Level | None = None,
    prelude: str = "",
) -> Generator[Outcome]:
    """The outcome of each run, as it ends; each is a process of its own, and one that failed does not end the others.

    `prelude` is a program of ours whose names the other finds, e.g. imports.
    Close the iterator to stop early. At most as many programs run at once as there are cores; others wait.

    Raises:
        OSError: no process can be started.
        ToolFailure: none could be closed off, so that the program was never run.
    """
    limits = limits or Limits()
    with _turns, _folder() as folder:
        job = _job(source, runs, limits, folder, level or isolation_level()) | {"prelude": prelude}
        n_lost = len(runs)
        with _warden(job) as (process, log), closing(_lines(process, 1 + len(runs), limits)) as lines:
            if next(lines, b"") != READY:
                raise ToolFailure(f"a program could not be closed off: {log()}")
            for line in lines:
                n_lost -= 1
                yield _outcome(line)
            if n_lost:
                logger.info("a program took its warden along: %s", log())
        for _ in range(n_lost):
            yield Outcome("lost")


def run_once(source: str, stdin: str = "", limits: Limits | None = None, level: Level | None = None) -> Outcome:
    """The outcome of a single run."""
    (outcome,) = run_program(source, [Stdin(stdin)], limits, level)
    return outcome


def isolation_level() -> Level:
    """What this machine offers; found out once, by trying."""
    reason = _why_not_closed_off()
    return "namespaces" if reason is None else "limits"


def level_for(demand: Demand) -> Level:
    """The level to run programs at where a setting demands one.

    Raises:
        OSError: it demands `namespaces`, and this machine has none.
    """
    if demand == "namespaces" and (reason := _why_not_closed_off()) is not None:
        raise OSError(
            f"isolation={demand}, but programs cannot be closed off on this machine ({reason}). Allow users to make "
            "namespaces, or set isolation=best"
        )
    return isolation_level()


@cache
def _why_not_closed_off() -> str | None:
    """Why programs cannot run in namespaces here; None where they can."""
    reason = ""
    for _ in range(N_TRIALS):
        try:
            outcome = run_once("", level="namespaces")
        except ToolFailure as failure:
            reason = str(failure)
        else:
            if outcome.is_success:
                return None
            reason = f"a program that does nothing ended with {outcome.end}, status {outcome.status}"
        time.sleep(TRIAL_SECONDS)
    logger.warning(
        "Programs that models write run within limits, but not cut off from files and processes of this user: %s",
        reason,
    )
    return reason


def _job(source: str, runs: Sequence[Stdin | Call], limits: Limits, folder: str, level: Level) -> dict[str, Any]:
    told = [{"stdin": run.text} if isinstance(run, Stdin) else {"call": run.name, "args": run.args} for run in runs]
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_libraries()]
    return {
        "source": source,
        "prelude": "",
        "runs": told,
        "limits": asdict(limits),
        "folder": folder,
        "level": level,
        "python": [os.path.realpath(path) for path in python],
    }


def _libraries() -> list[str]:
    """Where installed packages are."""
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
    """The process that runs the job, and a function for what it complained of; gone afterwards, with all it started."""
    mark = secrets.token_hex(16)
    home = PLACE if job["level"] == "namespaces" else job["folder"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", MARK: mark}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # threads take addresses, which are limited
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
            has_ended = _ends(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            if not has_ended:
                _sweep(mark)


def _ends(process: subprocess.Popen[bytes]) -> bool:
    """Whether a warden that has nothing more to do ends well by itself."""
    try:
        return process.wait(END_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False


def _tail(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _sweep(mark: str) -> None:
    """Kill processes that have left their group, when nobody is left who knows of them."""
    wanted = f"{MARK}={mark}".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _lines(process: subprocess.Popen[bytes], n_lines: int, limits: Limits) -> Generator[bytes]:
    """Lines of the warden, while it keeps to its time."""
    assert process.stdout is not None
    most = 8 * 3 * limits.output_bytes + (1 << 16)  # JSON may escape every byte
    read = bytearray()
    deadline = time.monotonic() + START_SECONDS + limits.seconds + GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while n_lines and selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            read += chunk
            if not chunk or len(read) > most:
                return
            while (end := read.find(b"\n")) >= 0:
                yield bytes(read[:end])
                del read[: end + 1]
                n_lines -= 1
                deadline = time.monotonic() + limits.seconds + GRACE_SECONDS


def _outcome(line: bytes) -> Outcome:
    try:
        return Outcome(**json.loads(line))
    except (ValueError, TypeError):  # whoever wrote this was not the warden
        return Outcome("lost")
