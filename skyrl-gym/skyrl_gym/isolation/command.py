"""Run a command in namespaces: it sees chosen folders, its own processes, and at most one port of a Unix socket.

    launch = isolate_command(Isolation(root="/tmp/abc/root", writable={"/work": "/tmp/abc/work"}, cwd="/work"), ["ls"])
    subprocess.run(launch.argv, input=launch.stdin)

Unlike `isolation.program`, the command may be any installed program, and its files outlive it. When the command exits,
all its descendants are killed. They are also killed when the caller dies.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from skyrl_gym.isolation.command_init import NOT_ISOLATED, PORT

PACKAGE = Path(__file__).parents[1]
BOOT = """
import sys, types
for name, folder in (("skyrl_gym", sys.argv[1]), ("skyrl_gym.isolation", sys.argv[1] + "/isolation")):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [folder]
from skyrl_gym.isolation.command_init import main
main()
"""
__all__ = ["NOT_ISOLATED", "PORT", "IsolatedLaunch", "Isolation", "isolate_command"]


@dataclass(frozen=True, slots=True)
class Isolation:
    """The files, the socket and the limits of a command."""

    root: str  # an empty folder to mount the root in
    writable: Mapping[str, str]  # folders of this machine by their path inside. One of them is /tmp
    cwd: str
    readable: Sequence[str] = ()  # paths of this machine, visible at the same place
    files: Mapping[str, str] = field(default_factory=dict)  # texts by path
    socket: str | None = None  # a Unix socket, inside at 127.0.0.1:8000
    env: Mapping[str, str] = field(default_factory=dict)
    n_threads: int = 1024  # of all processes together
    memory_bytes: int = 8 << 30  # of all processes together
    file_bytes: int = 4 << 30  # of each file
    total_bytes: int = 16 << 30  # of all files in `writable` together
    n_files: int = 250_000


@dataclass(frozen=True, slots=True)
class IsolatedLaunch:
    """A process to start on this machine. SIGTERM ends it and the command; it has ended when everything has."""

    argv: tuple[str, ...]
    stdin: bytes


def isolate_command(isolation: Isolation, argv: Sequence[str]) -> IsolatedLaunch:
    """Return the process that runs `argv` in isolation and exits with its status, or with `NOT_ISOLATED`."""
    job = json.dumps({**asdict(isolation), "argv": list(argv)})
    return IsolatedLaunch((sys.executable, "-I", "-S", "-c", BOOT, str(PACKAGE)), job.encode())
