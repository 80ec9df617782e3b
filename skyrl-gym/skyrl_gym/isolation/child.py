"""The process in which a program runs."""

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

from skyrl_gym.isolation.limits import limit
from skyrl_gym.isolation.seccomp import forbid_calls

RESULT_FD = 3  # where a called function's result is written
MOST_FDS = 4096
THREAD_STACK = 8 << 20  # bytes; the default would be as much as the main thread may have
FILE = "program.py"  # what a traceback calls it

Json = Mapping[str, Any]


def become_the_program(program: Json, run: Json, limits: Json, pipes: Mapping[str, int], *, is_alone: bool) -> NoReturn:
    """Take the limits on, let go of everything else, and run the program. `pipes`: where to write each stream."""
    status = 1
    try:
        os.setsid()
        os.nice(10)  # so that whoever watches is never kept from it
        for fd, name in ((1, "stdout"), (2, "stderr"), (RESULT_FD, "result")):
            os.dup2(pipes[name], fd)
        os.closerange(RESULT_FD + 1, MOST_FDS)
        _open_streams(run.get("stdin", ""))
        threading.stack_size(THREAD_STACK)
        limit(min(limits["seconds"], limits["cpu_seconds"]), limits["memory_bytes"], limits["file_bytes"])
        forbid_calls(with_signals=not is_alone)
        status = _run(program, run)
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()  # it would be run by an exit that also ends what we inherited from our parent
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
    """The program as `__main__`, or the call of what it defines. The exit status."""
    is_main = "call" not in run
    module = ModuleType("__main__" if is_main else "program")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv = [FILE]
    site.setquit()  # Python was started without the module that gives programs exit()
    try:
        for text, name in ((program["prelude"], "prelude"), (program["source"], FILE)):
            exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
        if not is_main:
            _call(module.__dict__, run["call"], run["args"])
        _wait_for_threads()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # noqa: BLE001, the boundary of the program
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _call(names: Mapping[str, Any], name: str, args: list[Any]) -> None:
    """Call a function of the program, or the method of its class `Solution`, and hand over the result."""
    solution = names.get("Solution")
    function = getattr(solution(), name) if isinstance(solution, type) and hasattr(solution, name) else names[name]
    result = json.dumps(function(*args), default=_as_json)
    with os.fdopen(RESULT_FD, "w", encoding="ascii") as out:
        out.write(result)


def _as_json(value: Any) -> Any:
    """Sets as lists, and what numpy has as Python has it."""
    return list(value) if isinstance(value, set | frozenset) else value.tolist()


def _wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
