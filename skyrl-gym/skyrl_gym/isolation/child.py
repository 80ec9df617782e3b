"""The child process that runs an untrusted program."""

from __future__ import annotations

import atexit
import json
import os
import site
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TextIO, cast

from skyrl_gym.isolation.limits import set_limits
from skyrl_gym.isolation.seccomp import forbid_calls

RESULT_FD = 3  # receives the result of a called function
MAX_FDS = 4096
THREAD_STACK = 8 << 20  # bytes; the default would be the limit of the main thread
FILE = "program.py"  # the program's name in tracebacks

Json = Mapping[str, Any]


def run_and_exit(program: Json, run: Json, limits: Json, pipes: Mapping[str, int], *, is_alone: bool) -> NoReturn:
    """Turn this process into the program: set the limits, close inherited files, and run it.

    `pipes` are the descriptors to write each stream to.
    """
    status = 1
    try:
        os.setsid()
        os.nice(10)  # so that the warden is never starved
        for fd, name in ((1, "stdout"), (2, "stderr"), (RESULT_FD, "result")):
            os.dup2(pipes[name], fd)
        os.closerange(RESULT_FD + 1, MAX_FDS)
        _open_streams(run.get("stdin", ""))
        threading.stack_size(THREAD_STACK)
        set_limits(min(limits["seconds"], limits["cpu_seconds"]), limits["memory_bytes"], limits["file_bytes"])
        forbid_calls(with_signals=not is_alone)
        status = _run(program, run)
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()  # a regular exit would also finalise state inherited from the parent
        for stream in (sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__):
            with suppress(BaseException):
                cast(TextIO, stream).flush()
        os._exit(status)


def _open_streams(stdin: str) -> None:
    with open("stdin", "w+b") as file:
        os.unlink("stdin")
        file.write(stdin.encode("utf-8", "surrogatepass"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
    sys.stdin, sys.stdout, sys.stderr = _text(0, "r"), _text(1, "w"), _text(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc, assignment]


def _text(fd: int, mode: str) -> TextIO:
    return cast(TextIO, open(fd, mode, encoding="utf-8", errors="replace", closefd=False))


def _run(program: Json, run: Json) -> int:
    """Run the program as `__main__`, or call a function that it defines. Return the exit status."""
    is_main = "call" not in run
    module = ModuleType("__main__" if is_main else "program")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv = [FILE]
    site.setquit()  # defines exit(), because Python was started without the module site
    try:
        for text, name in ((program["prelude"], "prelude"), (program["source"], FILE)):
            exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
        if not is_main:
            _call(module.__dict__, run["call"], run["args"])
        _wait_for_threads()
    except SystemExit as error:
        if run.get("ignores_exit_status"):
            return 0
        return error.code if isinstance(error.code, int) else int(error.code is not None)
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


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
