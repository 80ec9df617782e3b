"""Checks of a SkyPilot task before it is launched."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from skyrl_train.entrypoints.doctor import CheckResult

TIMEOUT_S = 30.0
FLAGS = '--git-url "$(git remote get-url origin)" --git-ref "$(git rev-parse HEAD)"'


def read_clouds(task: Path) -> list[str]:
    """Return the clouds in a task, or [] if it has none or cannot be read."""
    try:
        resources = yaml.safe_load(task.read_text(encoding="utf-8"))["resources"]
        choices = resources.get("any_of") or resources.get("ordered") or [resources]
        names = [choice.get("infra") or choice.get("cloud") for choice in choices]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        return []
    return [str(name).partition("/")[0].lower() for name in names if name]


def check_task(path: Path) -> Iterator[CheckResult]:
    """Check that a SkyPilot task's required variables are set and that its `workdir.ref` is the pushed branch."""
    try:
        task = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        yield CheckResult("task", "failed", f"{path} cannot be read: {error}")
        return
    if not isinstance(task, dict):
        yield CheckResult("task", "failed", f"{path} is not a mapping", "pass a SkyPilot task, e.g. tasks/my-task.yaml")
        return
    # A variable must be set if it is null in the file. An empty string counts as a value of an optional variable.
    sections = [task[name] for name in ("envs", "secrets") if isinstance(task.get(name), dict)]
    names = [name for variables in sections for name, value in variables.items() if value is None]
    unset = [name for name in names if not os.environ.get(name)]
    if unset:
        fix = "; ".join(f"--env {name}=${name}" for name in unset)
        yield CheckResult("task", "failed", f"{path}: {', '.join(unset)} must have a value", f"export and pass: {fix}")
    workdir = task.get("workdir")
    if not isinstance(workdir, dict) or "ref" not in workdir:
        yield CheckResult("workdir.ref", "ok", f"{path} uploads local files, or uses the default branch")
        return
    yield _check_workdir(path, str(workdir["ref"]), str(workdir.get("url") or "origin"))


def _check_workdir(path: Path, ref: str, url: str) -> CheckResult:
    """Check that the task will run the local commit."""
    folder = path.absolute().parent
    branch, commit = _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), _git(folder, "rev-parse", "HEAD")
    listed = _git(folder, "ls-remote", url, ref)
    name, setting = "workdir.ref", f"set workdir.ref: {branch} in {path}, or launch with {FLAGS}"
    if branch is None or commit is None:
        return CheckResult(name, "warning", f"{folder} is no git repository: {ref} cannot be compared")
    if listed is None:
        return CheckResult(name, "warning", f"{url} cannot be reached: {ref} cannot be compared with {branch}")
    if not listed and not commit.startswith(ref):
        return CheckResult(name, "failed", f"{url} has no branch or tag {ref}", f"push it, or {setting}")
    if listed and listed.split()[0] != commit:
        text = f"the task would run {ref} at {listed[:8]}, not the local {branch} at {commit[:8]}"
        return CheckResult(name, "failed", text, f"git push {url} {branch}, and {setting}")
    return CheckResult(name, "ok", f"{ref} is the local commit {commit[:8]}")


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git, or None if it fails or takes too long."""
    if (git := shutil.which("git")) is None:
        return None
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        command = [git, "-C", str(folder), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
