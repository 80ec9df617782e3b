"""Containers for tests: real ones of Podman where it works, and a stand-in for its command line everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).with_name("docker_stand_in.py")
PROGRAMS = """bash base64 cat chmod cp date dirname env find git grep head id kill ln ls mkdir mktemp mv printf ps rm
sed seq setsid sh sleep sort tail tee timeout touch tr true uname wc yes"""


def sleep(number: int) -> str:
    """Return a command that only this process of tests starts, so that its processes can be found."""
    return f"sleep 47{number}.{os.getpid():07}"


def write_stand_in(folder: Path) -> str:
    """Return the path of an executable that behaves as `docker run`, `exec` and `rm`, see `docker_stand_in.py`."""
    executable = folder / "docker"
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {folder} "$@"\n', encoding="utf-8")
    executable.chmod(0o755)
    return str(executable)


def build_podman_image(name: str, folder: Path, repository: Path | None = None) -> None:
    """Build an image with this machine's bash and git, and a repository in /testbed; skip the test if Podman fails."""
    if shutil.which("podman") is None:
        pytest.skip("Podman is not installed")
    for path in ("proc", "sys", "dev", "tmp", "root", "etc", "run", "usr/bin", "usr/lib/git-core"):
        (folder / path).mkdir(parents=True)
    for program in PROGRAMS.split():
        _copy_program(Path(shutil.which(program) or ""), folder)
    for link in ("bin", "lib", "lib64"):
        if Path("/", link).is_symlink():
            (folder / "usr" / link).mkdir(exist_ok=True)
            (folder / link).symlink_to(f"usr/{link}")
    if repository is not None:
        shutil.copytree(repository, folder / "testbed")
    with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
        imported = subprocess.run(["podman", "import", "-", name], stdin=tar.stdout, capture_output=True, check=False)
    tried = subprocess.run(["podman", "run", "--rm", name, "true"], capture_output=True, text=True, check=False)
    if imported.returncode or tried.returncode:
        pytest.skip(f"Podman cannot run containers here: {tried.stderr.strip()[-200:]}")


def remove_podman_image(name: str) -> None:
    subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=False)


def _copy_program(program: Path, root: Path) -> None:
    """Copy a program and its libraries to the same paths below a root."""
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.split()
    for path in (str(program), *(word for word in libraries if word.startswith("/"))):
        target = root / os.path.realpath(os.path.dirname(path)).lstrip("/") / os.path.basename(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(os.path.realpath(path), target)
