"""Changes to repositories, graded by the exit status of a test command."""

import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import Any, ClassVar

from skyrl_agent.tasks.base import BaseTask
from skyrl_agent.tasks.patches import PROTECTED, apply_patch, collect_patch, record_base
from skyrl_agent.workspaces import (
    ContainerWorkspace,
    LocalWorkspace,
    Workspace,
    in_thread,
    open_workspace,
    start_workspace,
)
from skyrl_train.errors import DataError
from skyrl_train.types import Message

MAX_TEST_OUTPUT_BYTES = 1 << 20

SYSTEM = (
    "You are a software engineer who works on a repository with a shell and an editor. Explore the code, reproduce the "
    "problem, fix its cause, and check the fix."
)

INSTRUCTION = """The repository is in {cwd}.

<issue>
{problem}
</issue>

Change the code so that the issue is resolved. Hidden tests decide whether it is. Changes to tests and to the settings \
of the test runner are undone before they run. You do not have to commit your changes."""

COMMIT = """[ -e .git ] || (git init -q && git add -A && \
git -c user.name=skyrl-agent -c user.email=skyrl-agent@localhost commit -q --allow-empty -m 'Initial state')"""


class RepositoryTask(BaseTask):
    """A change to a custom repository, in a container.

    The agent's patch is applied to a fresh copy of the repository, in a new container. The reward is 1 if the test
    command then succeeds. It is 0 if the command fails or hangs, or if the patch is empty or does not apply. Columns:

        problem_statement: what to change
        image: the container's image
        repo_path: a folder in the image to copy to `cwd` (optional)
        setup: shell commands that create or prepare the repository in `cwd` (optional)
        test_command: e.g. "python -m pytest -q tests"
        test_files: the tests as {path: text}, or JSON of it. The agent does not see them
        expected_output: text that the test command's output must contain, e.g. "12 passed" (optional)

    Code under test runs in the tests' process, so it can end that process with status 0 before the tests have run.
    `expected_output` catches this, but not code that also forges the output.
    """

    cwd: ClassVar[str] = "/workspace"
    """Folder of the repository in containers."""

    environment: ClassVar[Mapping[str, Any]] = {"pull_timeout": 1200, "container_timeout": "6h"}
    """Settings of mini-swe-agent's environment: see `ContainerWorkspace`."""

    protected_files: ClassVar[tuple[str, ...]] = PROTECTED
    """Glob patterns of files that patches cannot change, in addition to the row's test files."""

    start_timeout_s: ClassVar[float] = 1800.0
    """Seconds for a workspace to start, including the image download and `setup`."""

    test_timeout_s: ClassVar[float] = 1800.0
    """Seconds for the tests. Tests that take longer fail."""

    @classmethod
    def create_workspace(cls, instance: Mapping[str, Any]) -> Workspace:
        """Return an instance's workspace, not started yet."""
        return ContainerWorkspace(instance["image"], cls.cwd, cls.environment)

    @classmethod
    def prepare(cls, workspace: Workspace, instance: Mapping[str, Any]) -> None:
        """Create the repository in a started workspace."""
        if path := instance.get("repo_path"):
            workspace.run(f"cp -a -- {shlex.quote(path)}/. .", cls.start_timeout_s)
        if setup := instance.get("setup"):
            workspace.run(setup, cls.start_timeout_s)
        workspace.run(COMMIT)

    @classmethod
    async def initialize_runtime(cls, instance: Mapping[str, Any]) -> Workspace:
        """Start the agent's workspace."""

        def prepare(workspace: Workspace) -> None:
            cls.prepare(workspace, instance)
            record_base(workspace)

        return await start_workspace(cls.create_workspace(instance), cls.start_timeout_s, prepare)

    @classmethod
    def get_instruction(cls, instance: Mapping[str, Any], runtime: Workspace) -> list[Message]:
        """Return the description of the issue."""
        content = INSTRUCTION.format(cwd=runtime.cwd, problem=instance["problem_statement"].strip())
        return [Message(role="system", content=SYSTEM), Message(role="user", content=content)]

    @classmethod
    def complete_runtime(cls, runtime: Workspace) -> str:
        """Return the agent's changes as a patch."""
        return collect_patch(runtime)

    @classmethod
    async def evaluate_result(cls, result: Any, instance: Mapping[str, Any]) -> dict[str, float]:
        """Apply a patch in a fresh workspace and run the tests.

        Raises:
            WorkspaceError: the workspace failed, so the reward is unknown.
        """
        patch = result if isinstance(result, str) else ""
        if not patch.strip():
            return {"reward": 0.0, "patch_is_empty": 1.0, "patch_applies": 0.0}
        workspace, tests = cls.create_workspace(instance), cls.test_paths(instance)
        async with open_workspace(workspace, cls.start_timeout_s, partial(cls.prepare, instance=instance)):
            applies = await in_thread(partial(apply_patch, workspace, patch, tests, cls.protected_files))
            passes = applies and await in_thread(partial(cls.run_tests, workspace, instance))
        return {"reward": float(passes), "patch_is_empty": 0.0, "patch_applies": float(applies)}

    @classmethod
    def test_paths(cls, instance: Mapping[str, Any]) -> list[str]:
        """Return the paths of the tests. Patches cannot change them."""
        return list(parse_test_files(instance))

    @classmethod
    def run_tests(cls, workspace: Workspace, instance: Mapping[str, Any]) -> bool:
        """Write the tests and run them in a patched workspace. Return True if the patch passes."""
        for path, text in parse_test_files(instance).items():
            workspace.write_bytes(path, text.encode())
        result = workspace.execute(instance["test_command"], cls.test_timeout_s, MAX_TEST_OUTPUT_BYTES)
        return result.status == 0 and (instance.get("expected_output") or "") in result.output

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row with a missing column."""
        require_text(instance, ("problem_statement", "test_command", "image"))
        parse_test_files(instance)


class LocalRepositoryTask(RepositoryTask):
    """A `RepositoryTask` in a temporary folder on this machine, without isolation: see `LocalWorkspace`.

    Rows need `repo_path`, a folder on this machine, or `setup`. They have no `image`.
    """

    @classmethod
    def create_workspace(cls, instance: Mapping[str, Any]) -> Workspace:
        """Return an instance's workspace, not started yet."""
        return LocalWorkspace()

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError for a row with a missing column."""
        require_text(instance, ("problem_statement", "test_command"))
        if not (instance.get("repo_path") or instance.get("setup")):
            raise DataError("the instance has neither repo_path nor setup; set the folder to copy, or commands")
        parse_test_files(instance)


def require_text(instance: Any, columns: tuple[str, ...]) -> None:
    """Raise DataError if a row lacks one of the columns or has no text in it."""
    if not isinstance(instance, Mapping):
        raise DataError(f"the instance is a {type(instance).__name__}; it must be a row with {', '.join(columns)}")
    for column in columns:
        if not isinstance(instance.get(column), str) or not instance[column].strip():
            raise DataError(f"the instance has no text in {column}, but {instance.get(column)!r}")


def parse_test_files(instance: Mapping[str, Any]) -> dict[str, str]:
    """Return a row's `test_files`: relative paths and texts. Paths without a text, as Arrow adds them, are dropped.

    Raises:
        DataError: it is not such a mapping.
    """
    files = instance.get("test_files") or {}
    try:
        files = json.loads(files) if isinstance(files, str) else files
    except ValueError as error:
        raise DataError(f"test_files is not JSON: {error}") from error
    if not isinstance(files, Mapping):
        raise DataError(f"test_files is a {type(files).__name__}; it must be a mapping of paths to texts")
    files = {path: text for path, text in files.items() if text is not None}
    for path, text in files.items():
        parts = PurePosixPath(path).parts
        if not isinstance(text, str) or not parts or parts[0] == "/" or ".." in parts or ".git" in parts:
            raise DataError(
                f"test_files has {path!r}: {str(text)[:40]!r}; set relative paths in the repository to texts"
            )
    return files
