"""Containers: real ones of Podman where it works, and a stand-in for Docker's command line everywhere."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = """bash base64 cat chmod cp date dirname env find git grep head id kill ln ls mkdir mkfifo mktemp mv printf
ps rm sed seq setsid sh sleep sort tail tee timeout touch tr true uname wc yes"""


@dataclass(frozen=True)
class DockerStandIn:
    """A folder with an executable that behaves as `docker run`, `exec` and `rm`, see `docker_stand_in.py`."""

    folder: Path

    @property
    def executable(self) -> str:
        return str(self.folder / "docker")

    @property
    def image(self) -> str:
        """Name of an image: a folder, which is empty at first."""
        return str(self.folder / "image")

    def containers(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name not in ("docker", "image"))


def create_docker(folder: Path) -> DockerStandIn:
    """Create a stand-in with an empty image; skip the test if mini-swe-agent, which calls Docker, is not installed."""
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: pip install './skyrl-agent[swe]'")
    docker = DockerStandIn(folder)
    Path(docker.image).mkdir(parents=True)
    program = Path(__file__).with_name("docker_stand_in.py")
    executable = Path(docker.executable)
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {program} {folder} "$@"\n', encoding="utf-8")
    executable.chmod(0o755)
    return docker


@contextmanager
def podman_image(folder: Path, testbed: Path | None = None) -> Iterator[str]:
    """Yield an image with this machine's bash and git, and a folder as /testbed; skip the test if Podman fails.

    No container of the image may remain.
    """
    pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: pip install './skyrl-agent[swe]'")
    if shutil.which("podman") is None:
        pytest.skip("Podman is not installed")
    name = f"localhost/skyrl-agent-{folder.name}:{os.getpid()}"
    _write_root(folder, testbed)
    with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
        imported = subprocess.run(["podman", "import", "-", name], stdin=tar.stdout, capture_output=True, check=False)
    tried = subprocess.run(["podman", "run", "--rm", name, "true"], capture_output=True, text=True, check=False)
    if imported.returncode or tried.returncode:
        pytest.skip(f"Podman cannot run containers here: {tried.stderr.strip()[-200:]}")
    yield name
    list_containers = ["podman", "ps", "-a", "--filter", f"ancestor={name}", "-q"]
    remaining = subprocess.run(list_containers, capture_output=True, check=True).stdout
    subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=False)
    assert remaining == b""


def _write_root(folder: Path, testbed: Path | None) -> None:
    for path in ("proc", "sys", "dev", "tmp", "root", "etc", "run", "usr/bin", "usr/lib/git-core"):
        (folder / path).mkdir(parents=True)
    for program in PROGRAMS.split():
        _copy_program(Path(shutil.which(program) or ""), folder)
    for link in ("bin", "lib", "lib64"):
        if Path("/", link).is_symlink():
            (folder / "usr" / link).mkdir(exist_ok=True)
            (folder / link).symlink_to(f"usr/{link}")
    if testbed is not None:
        shutil.copytree(testbed, folder / "testbed")


def _copy_program(program: Path, root: Path) -> None:
    """Copy a program and its libraries to the same paths below a root."""
    libraries = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout.split()
    for path in (str(program), *(word for word in libraries if word.startswith("/"))):
        target = root / os.path.realpath(os.path.dirname(path)).lstrip("/") / os.path.basename(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(os.path.realpath(path), target)
