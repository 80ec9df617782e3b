"""Attacks on the process that runs a program, in `attacks.yaml`, and other hostile programs.

The targets are a process that exists only for the attack, so that an attack that succeeds harms nothing else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from skyrl_gym.isolation.program import Level

COMMON = """
import ctypes, fcntl, glob, mmap, os, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
TARGET, ADDRESS, FOLDER, PORT = {target}, {address}, {folder!r}, {port}
def attempt(function, *args):
    try: return function(*args)
    except (OSError, ValueError): return None
def read(path):
    with open(path, "rb") as file: return file.read()
def leave(function, *args):
    if os.fork() == 0:
        if os.fork() == 0: function(*args)
        os._exit(0)
    os.wait()
def hold(fd, w):
    memory, size = mmap.mmap(fd, 128 << 20), 4 << 20
    for start in range(0, len(memory), size):
        memory[start : start + size : 4096] = bytes(size // 4096)
        memory.madvise(mmap.MADV_DONTNEED, start, size)  # the pages stay, but no process counts them
    os.write(w, b"x"); time.sleep(99)
def share_memory(fd):
    r, w = os.pipe()
    for i in range(6):
        if os.fork() == 0: attempt(hold, fd, w); os._exit(1)
    os.close(w)
    if sum(len(os.read(r, 1)) for i in range(6)) == 6: print("harm")
"""
"""The start of the program of each attack."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A program, what it needs, the allowed ends of its run, and the limit of its CPU time."""

    source: str
    needs: Literal["", "user", "files"] = ""
    ends: str = "exit"
    cpu_seconds: float = 1.0

    def is_prevented(self, level: Level, *, is_root: bool) -> bool:
        """Return True if this level claims to prevent the attack on a process of root or of a user."""
        return level != "limits" or self.needs == "" or (self.needs == "user" and is_root)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


ATTACKS = {name: Attack(**fields) for name, fields in _read("attacks.yaml").items()}
HOSTILE = _read("hostile_programs.yaml")
"""By name: the source, the allowed ends of a run, and whether it may succeed."""
