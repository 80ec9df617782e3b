"""An outer containment, in which hostile programs do no harm even where a limit under test is broken.

A command runs in a process namespace, which ends with it and holds all that it may kill; in a cgroup with a memory
limit; with a temporary folder of limited size; and, as `user`, as a user without other processes, of whom there may be
few. None of this is code under test, except the cgroup.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Literal

from gym_kit.processes import KIT
from skyrl_gym.isolation import program
from skyrl_gym.isolation.cgroup import memory_cgroup
from skyrl_gym.isolation.program import Level

Identity = Literal["root", "user"]
MEMORY_BYTES = 3 << 30
N_PROCESSES = 400
USER = 0x5EED_0000 + os.getpid()  # no account, and not that of another run of the tests
SECONDS = 280.0


def supported_levels() -> tuple[Level, ...]:
    problems = {"namespaces": program._namespace_problem, "landlock": program._landlock_problem}
    return (*(level for level in ("namespaces", "landlock") if problems[level]() is None), "limits")


def identities() -> tuple[Identity, ...]:
    """Return the users as whom a contained command can run: everybody, if pytest runs as root."""
    return ("root", "user") if os.geteuid() == 0 else ("user",)


def run_contained(module: str, *arguments: str, identity: Identity, seconds: float = SECONDS) -> str:
    """Run `python -m module arguments` and return its output. Its secret is the variable HIDDEN of its environment."""
    with tempfile.TemporaryDirectory(prefix="contained-") as scratch, memory_cgroup(MEMORY_BYTES) as cgroup:
        os.chmod(scratch, 0o755)
        join = "" if cgroup is None else f"echo 0 > /proc/self/fd/{cgroup[0]};"
        is_root = os.geteuid() == 0
        steps = [f"mount -t tmpfs -o size=512m,mode=1777 scratch {scratch}", *_open_python(scratch)]
        command = [sys.executable, "-m", module, *arguments]
        if identity == "user":
            as_user = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
            command = ["prlimit", f"--nproc={N_PROCESSES}", *(["setpriv", *as_user] if is_root else []), *command]
        steps += [shlex.join(command), "exit $?"]
        script = f"{join} exec {shlex.join([*_unshare(), 'sh', '-euc', '; '.join(steps)])}"
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, [str(KIT), *sys.path[1:]])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": scratch,
            "HOME": scratch,
            "HIDDEN": "hunter2",
        }
        result = subprocess.run(
            ["sh", "-euc", script],
            env=environment,
            pass_fds=cgroup or (),
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds,
            check=True,
        )
        return result.stdout


@cache
def problem() -> str | None:
    """Return the reason why programs cannot be contained on this machine, or None if they can."""
    try:
        subprocess.run(
            [*_unshare(), "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    return None


def _unshare() -> list[str]:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    return command if os.geteuid() == 0 else [*command, "--user", "--map-root-user"]


def _open_python(scratch: str) -> list[str]:
    """Return commands that make Python readable for every user, where it is in the folder of one user."""
    python = Path(os.path.realpath(sys.base_prefix))
    closed = [path for path in reversed(python.parents) if not path.stat().st_mode & 0o001]
    if not closed or os.geteuid() != 0:
        return []
    hold = f"{scratch}/python"
    return [
        f"mkdir {hold}",
        f"mount --bind {python} {hold}",
        f"mount -t tmpfs -o mode=755 home {closed[0]}",
        f"mkdir -p {python}",
        f"mount --move {hold} {python}",
        f"rmdir {hold}",
    ]
