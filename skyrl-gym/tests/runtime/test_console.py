"""Printing to a console that is closed, full or gone costs what is printed, and nothing else."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

PROGRAM = """
import logging, sys
from skyrl_gym.runtime.console import guard_console

logging.getLogger("skyrl_gym").addHandler(logging.FileHandler(sys.argv[1]))
guard_console()
guard_console()
for _ in range(3):
    print("caf\\u00e9", "x" * 100_000, flush=True)
    sys.stderr.write("x" * 100_000 + "\\n")
    sys.stdout.buffer.write(b"bytes\\n")
print("unflushed")
logging.getLogger("skyrl_gym").warning("done")
"""


@contextmanager
def pipe_without_reader() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def full_pipe() -> Iterator[int]:
    """The write end of a non-blocking pipe that fills up because nobody reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    yield writer
    os.close(reader)
    os.close(writer)


@contextmanager
def closed_terminal() -> Iterator[int]:
    terminal, console = pty.openpty()
    os.close(terminal)
    yield console
    os.close(console)


@contextmanager
def file(path: str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    yield descriptor
    os.close(descriptor)


LOST: dict[str, Callable[[], AbstractContextManager[int]]] = {
    "pipe": pipe_without_reader,
    "terminal": closed_terminal,
    "full disk": lambda: file("/dev/full", os.O_WRONLY),
    "full pipe": full_pipe,
    "read-only": lambda: file("/dev/null", os.O_RDONLY),
}


@pytest.mark.parametrize("flags", [[], ["-u"]], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("kind", LOST)
def test_a_console_that_is_lost_does_not_end_the_program(kind: str, flags: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with LOST[kind]() as console:
        command = [sys.executable, *flags, "-c", PROGRAM, str(log)]
        finished = subprocess.run(command, stdout=console, stderr=console, check=False)
    assert finished.returncode == 0
    lines = log.read_text().splitlines()
    assert lines[-1] == "done"
    assert sorted(line.split(": ")[0] for line in lines[:-1]) == [
        "Failed to write to standard error",
        "Failed to write to standard output",
    ]


def test_a_program_may_start_without_a_console(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = ["sh", "-c", '"$0" "$@" >&- 2>&-', sys.executable, "-c", PROGRAM, str(log)]
    assert subprocess.run(command, check=False).returncode == 0
    assert log.read_text() == "done\n"


def test_what_can_be_written_arrives_unchanged(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log")]
    finished = subprocess.run(command, capture_output=True, env=environment, check=True)
    line = b"caf\xe9 " + b"x" * 100_000 + b"\n"
    assert finished.stdout == (line + b"bytes\n") * 3 + b"unflushed\n"
    assert finished.stderr == (b"x" * 100_000 + b"\n") * 3
