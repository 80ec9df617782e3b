"""Task folders in Harbor's format, as published with Terminal-Bench 2. The package `harbor` is not needed.

    task.toml   instruction.md   environment/Dockerfile   tests/test.sh   solution/solve.sh

The agent sees the instruction and the environment. `tests` are copied to /tests after it has ended. `tests/test.sh`
then writes the reward to /logs/verifier/reward.json or reward.txt. `solution` is never copied.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skyrl_agent.harness.config import WorkspaceConfig
from skyrl_train.errors import DataError

CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
VARIABLE = re.compile(r"\$\{(\w+)(?::-(.*))?\}")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
DEFAULTS: tuple[Any, ...] = (None, "", 0, [], {}, "root", 0.0)
BUILD_TIMEOUT_S = 3600.0


class _Table(BaseModel):
    """A table of task.toml. Unknown keys are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow")


class AgentTable(_Table):
    timeout_sec: float | None = None


class VerifierTable(_Table):
    timeout_sec: float | None = None
    env: dict[str, str] = Field(default={})


class EnvironmentTable(_Table):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    env: dict[str, str] = Field(default={})
    workdir: str | None = None


class HarborSettings(_Table):
    """The keys of task.toml that are used."""

    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()


IGNORED: Mapping[str, Sequence[str]] = {
    "": ("schema_version", "version", "task", "metadata", "solution", "source", "artifacts"),
    "agent": ("network_mode", "allowed_hosts"),
    "verifier": ("network_mode", "allowed_hosts"),
    "environment": (
        *("build_timeout_sec", "storage_mb", "storage", "memory", "network_mode", "allowed_hosts", "allow_internet"),
        "gpu_types",
    ),
}
"""Keys that change nothing here. The network is `workspace.network`, whatever the task allows."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder."""

    folder: Path
    instruction: str
    settings: HarborSettings

    @classmethod
    def read(cls, folder: Path) -> HarborTask:
        """Read a folder. Raises DataError if it is not a task."""
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            lines = (folder / "instruction.md").read_text(encoding="utf-8").split("\n")
            if not (folder / "tests/test.sh").is_file():
                raise FileNotFoundError(f"there is no {folder}/tests/test.sh")
            parsed = HarborSettings.model_validate(settings)
        except (OSError, ValueError, ValidationError) as error:
            raise DataError(f"{folder} is not a Harbor task: {' '.join(str(error).split())}") from error
        while lines and (CANARY.match(lines[0].strip()) or not lines[0].strip()):
            del lines[0]
        return cls(folder.resolve(), "\n".join(lines), parsed)

    @property
    def has_image(self) -> bool:
        """True if the task names an image or describes one."""
        return self.settings.environment.docker_image is not None or (self.folder / "environment/Dockerfile").is_file()

    @property
    def image(self) -> str:
        """The name of the task's image. A Dockerfile's is a hash of its folder."""
        return self.settings.environment.docker_image or f"skyrl-harbor:{self.digest('environment')[:24]}"

    @property
    def run_args(self) -> tuple[str, ...]:
        """The limits of the container, as options of `docker run`."""
        environment = self.settings.environment
        limits = {"--cpus": environment.cpus, "--memory": environment.memory_mb and f"{environment.memory_mb}m"}
        return tuple(part for name, value in limits.items() if value for part in (name, f"{value}"))

    def digest(self, folder: str = ".") -> str:
        """Return a hash of the names and contents of all files in `folder`."""
        hashed = hashlib.blake2b(digest_size=20)
        for path in sorted((self.folder / folder).rglob("*")):
            if path.is_file():
                content = path.read_bytes()
                hashed.update(
                    f"{path.relative_to(self.folder)}\0{path.stat().st_mode & 0o111}\0{len(content)}\0".encode()
                )
                hashed.update(content)
        return hashed.hexdigest()

    def check(self, workspace: WorkspaceConfig, pass_env: Sequence[str]) -> None:
        """Raise DataError if this task needs something that the workspace or this package lacks."""
        problems = list(self._find_unsupported())
        if workspace.kind == "unisolated":
            problems.append("its tests run only in isolation; set workspace.kind=isolated, docker or podman")
        elif workspace.kind == "isolated" and self.has_image and not workspace.ignore_dockerfile:
            problems.append(
                "it needs its image; set workspace.kind=docker, or workspace.ignore_dockerfile=true to run it with the "
                "programs of this machine"
            )
        elif workspace.kind in ("docker", "podman") and not self.has_image:
            problems.append("it has neither docker_image nor environment/Dockerfile; set workspace.kind=isolated")
        for env in (self.settings.environment.env, self.settings.verifier.env):
            problems += _find_unset(env, pass_env)
        if problems:
            raise DataError(f"{self.folder}: {'; '.join(problems)}")

    def _find_unsupported(self) -> Iterator[str]:
        tables: Mapping[str, _Table] = {
            "": self.settings,
            "agent": self.settings.agent,
            "verifier": self.settings.verifier,
            "environment": self.settings.environment,
        }
        for name, table in tables.items():
            for key, value in (table.model_extra or {}).items():
                is_shared = (name, key, value) == ("verifier", "environment_mode", "shared")
                if key not in IGNORED[name] and value not in DEFAULTS and not is_shared:
                    yield f"{name + '.' if name else ''}{key}={str(value)[:60]} is not supported"
        if self.settings.environment.os != "linux":
            yield f"environment.os={self.settings.environment.os} is not supported"
        yield from (
            f"environment/{file} is not supported" for file in COMPOSE if (self.folder / "environment" / file).exists()
        )

    def resolve_env(self, env: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
        """Return variables with `${NAME}` and `${NAME:-default}` replaced, from this process's variables `pass_env`."""
        resolved = dict(env)
        for key, value in env.items():
            if match := VARIABLE.fullmatch(value):
                passed = os.environ if match[1] in pass_env else {}
                resolved[key] = passed.get(match[1], match[2] or "")
        return resolved

    def build_image(self, executable: str) -> None:
        """Build or pull the image, unless it exists. Raises DataError if that fails."""
        if _run(executable, "image", "inspect", self.image).returncode == 0:
            return
        if self.settings.environment.docker_image is not None:
            result = _run(executable, "pull", self.image)
        else:
            result = _run(executable, "build", "--quiet", "--tag", self.image, str(self.folder / "environment"))
        if result.returncode != 0:
            raise DataError(
                f"{self.folder}: the image {self.image} cannot be built or pulled: {result.stderr.strip()[-300:]}"
            )


def harbor_rows(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each task in `folder`, or for `folder` itself. Raises DataError if there is none."""
    folders = (
        [folder] if (folder / "task.toml").is_file() else sorted(path.parent for path in folder.glob("*/task.toml"))
    )
    if not folders:
        raise DataError(f"harbor:{folder} has no task: there is no task.toml in it or in its folders")
    tasks = [HarborTask.read(path) for path in folders]
    return [
        {
            "prompt": [{"role": "user", "content": task.instruction}],
            "data_source": "harbor",
            "harbor": str(task.folder),
            "harbor_digest": task.digest(),
        }
        for task in tasks
    ]


def _find_unset(env: Mapping[str, str], pass_env: Sequence[str]) -> Iterator[str]:
    for value in env.values():
        match = VARIABLE.fullmatch(value)
        if match and match[2] is None and (match[1] not in pass_env or match[1] not in os.environ):
            yield f"it needs the variable {match[1]}; set it, and add it to pass_env of the harness file"


@cache
def image_workdir(executable: str, image: str) -> str:
    """Return an image's WORKDIR, or /app."""
    result = _run(executable, "image", "inspect", "--format", "{{.Config.WorkingDir}}", image)
    return result.stdout.strip() or "/app"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"{command[0]} cannot be run ({error}); install it, or set workspace.kind=isolated") from error
