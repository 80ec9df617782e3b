"""The child process that runs an untrusted program."""

import atexit
import json
import os
import resource
import signal
import site
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from skyrl_gym.isolation.credentials import CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, become_user, is_readable_by_all
from skyrl_gym.isolation.kernel import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, prctl, set_limit
from skyrl_gym.isolation.landlock import restrict_access
from skyrl_gym.isolation.namespaces import RANDOM, SYSTEM
from skyrl_gym.isolation.seccomp import forbid_calls

RESULT_FD = 3  # receives the result of a called function
FAILURE_FD = 4  # receives why the program cannot be confined
FDS = {"stdout": 1, "stderr": 2, "result": RESULT_FD, "failure": FAILURE_FD}
MAX_FDS = 4096
MAX_OPEN_FILES = 64
MAX_STACK_BYTES = 64 << 20  # large, because many solutions recurse deeply
THREADS_PER_PROCESS = 8  # maximum, on average over the processes of a run
THREAD_STACK = 8 << 20  # bytes; the default would be the limit of the main thread
FILE = "program.py"  # the program's name in tracebacks

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Confinement:
    """A child's isolation, besides the limits.

    level: `namespaces`, `landlock` or `limits`.
    user: the user id that it becomes. None keeps the current user.
    cgroup: descriptors to join a cgroup with, and to read its events. None without a cgroup.
    python: the folders of Python and its packages.
    """

    level: str
    user: int | None
    cgroup: tuple[int, int] | None
    python: Sequence[str]

    @property
    def is_alone(self) -> bool:
        """True if the child sees only its own processes."""
        return self.level == "namespaces"

    @contextmanager
    def as_user(self) -> Iterator[None]:
        """Act as the child's user inside its parent."""
        if self.user is None:
            yield
            return
        parent = os.getppid()
        os.setresgid(-1, self.user, -1)
        os.setresuid(-1, self.user, -1)
        try:
            yield
        finally:
            os.setresuid(-1, 0, -1)
            os.setresgid(-1, 0, -1)
            # The kernel resets both when a process changes its user.
            prctl(PR_SET_DUMPABLE, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

    def _capabilities(self) -> Sequence[int]:
        """Return the capabilities that the user needs to read Python's files. The first available one is enough.

        Landlock also confines a user with capabilities, so there it may also keep them for a closed temporary folder.
        """
        if self.level == "landlock":
            folders = (*self.python, os.path.dirname(os.getcwd()))
            return () if is_readable_by_all(folders) else (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE)
        return () if is_readable_by_all(self.python) else (CAP_DAC_READ_SEARCH,)

    def enter(self, limits: Json) -> None:
        """Confine this process, permanently, to its current folder and the limits."""
        if self.user is not None:
            become_user(self.user, self._capabilities())
        prctl(PR_SET_DUMPABLE, 1)  # lets the warden see its open files
        resources = {
            resource.RLIMIT_CPU: int(min(limits["seconds"], limits["cpu_seconds"])) + 1,
            resource.RLIMIT_AS: limits["memory_bytes"],
            resource.RLIMIT_FSIZE: limits["file_bytes"],
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_STACK: MAX_STACK_BYTES,
            resource.RLIMIT_CORE: 0,
        }
        if self.user is not None:  # no other process has this user; the warden acts first
            resources[resource.RLIMIT_NPROC] = limits["n_processes"] * (THREADS_PER_PROCESS + 1)
        for name, value in resources.items():
            # Contest programs raise the stack limit. RLIMIT_AS bounds it anyway.
            set_limit(name, value, is_final=name != resource.RLIMIT_STACK)
        if self.level == "landlock":
            restrict_access((*SYSTEM, *RANDOM, *self.python), (os.devnull, "."))
        forbid_calls(is_alone=self.is_alone, counts_memory=self.cgroup is not None)


def run_and_exit(
    program: Json, run: Json, limits: Json, pipes: Mapping[str, int], confinement: Confinement
) -> NoReturn:
    """Turn this process into the program: close inherited files, enter the confinement, and run it.

    `pipes` maps each stream to the descriptor to write to.
    """
    status = 1
    try:
        try:
            _confine(run, limits, pipes, confinement)
        except BaseException as error:
            os.write(FAILURE_FD, f"{type(error).__name__}: {error}".encode())
            raise
        os.close(FAILURE_FD)
        status = _run(program, run)
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()  # a regular exit would also finalize state inherited from the parent
        for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
            with suppress(BaseException):
                cast(TextIO, stream).flush()
        os._exit(status)


def _confine(run: Json, limits: Json, pipes: Mapping[str, int], confinement: Confinement) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    os.nice(10)  # keeps the warden from being starved
    if confinement.cgroup is not None:
        os.write(confinement.cgroup[0], b"0")
        for fd in confinement.cgroup:
            os.close(fd)
    for name, fd in FDS.items():
        os.dup2(pipes[name], fd)
    os.closerange(max(FDS.values()) + 1, MAX_FDS)
    stdin = run.get("stdin", "")
    with open("stdin", "w+b") as file:
        os.unlink("stdin")
        file.write(stdin.encode("utf-8", "surrogatepass"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin, sys.stdout, sys.stderr = _text(0, "r"), _text(1, "w"), _text(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc, assignment]
    threading.stack_size(THREAD_STACK)
    confinement.enter(limits)


def _text(fd: int, mode: str) -> TextIO:
    return cast(TextIO, open(fd, mode, encoding="utf-8", errors="replace", closefd=False))


def _run(program: Json, run: Json) -> int:
    """Run the program as `__main__`, or call a function that it defines. Return the exit status."""
    is_main = "call" not in run
    module = ModuleType("__main__" if is_main else "program")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv, module.__file__ = [FILE], FILE
    site.setquit()  # defines exit(), because Python was started without the module site
    try:
        for text, name in ((program["prelude"], "prelude"), (program["source"], FILE)):
            exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
        if not is_main:
            _call(module.__dict__, run["call"], run["args"])
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as error:
        if run.get("ignores_exit_status"):
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001, the boundary of the program
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # leaves this function out
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _call(names: Mapping[str, Any], name: str, args: list[Any]) -> None:
    """Call a function of the program, or a method of its class `Solution`, and write the result."""
    solution = names.get("Solution")
    function = getattr(solution(), name) if isinstance(solution, type) and hasattr(solution, name) else names[name]
    result = json.dumps(function(*args), default=_as_json)
    with os.fdopen(RESULT_FD, "w", encoding="ascii") as out:
        out.write(result)


def _as_json(value: Any) -> Any:
    """Convert sets to lists, and numpy values to Python values."""
    return list(value) if isinstance(value, set | frozenset) else value.tolist()
