"""Patches: what is collected, what applies, and what a patch cannot change."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_agent.tasks.patches import apply_patch, changed_paths, collect_patch, record_base
from skyrl_agent.workspaces import LocalWorkspace, Workspace, WorkspaceError

SETUP = """git init -q && mkdir -p src tests && echo one >src/a.py && echo old >tests/test_a.py
echo ignored >.gitignore
printf 'a\\r\\n' >crlf && printf 'caf\\351\\n' >latin1 && echo x >setup.cfg
git add -A && git -c user.name=a -c user.email=a@b commit -qm base && echo dirty >>src/a.py && echo new >untracked"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with uncommitted changes."""
    folder = tmp_path_factory.mktemp("repository")
    subprocess.run(["bash", "-c", SETUP], cwd=folder, check=True)
    return folder


@pytest.fixture
def workspaces(repository: Path) -> Iterator[tuple[LocalWorkspace, LocalWorkspace]]:
    """The agent's workspace and a fresh one."""
    pair = LocalWorkspace(), LocalWorkspace()
    for workspace in pair:
        workspace.start()
        shutil.copytree(repository, workspace.cwd, symlinks=True, dirs_exist_ok=True)
    record_base(pair[0])
    yield pair
    for workspace in pair:
        workspace.close()


def content(workspace: Workspace, path: str) -> bytes | None:
    file = Path(workspace.cwd, path)
    return file.read_bytes() if file.exists() else None


def test_a_patch_has_all_changes_since_the_start_committed_or_not(
    workspaces: tuple[LocalWorkspace, LocalWorkspace],
) -> None:
    agent, fresh = workspaces
    assert collect_patch(agent) == ""
    agent.run(
        "echo two >>src/a.py; git add -A; git -c user.name=a -c user.email=a@b commit -qm mine; echo three >>src/a.py\n"
        "printf 'b\\r\\n' >>crlf; printf 'caf\\351!\\n' >latin1; echo 'ü' >'a file ü'; echo x >ignored; rm untracked\n"
        "mv setup.cfg moved; printf '#!/bin/sh\\n' >run; chmod +x run; ln -s src link; : >empty"
    )
    staged_before = agent.run("git status --porcelain")
    patch = collect_patch(agent)
    assert agent.run("git status --porcelain") == staged_before
    assert apply_patch(fresh, patch, [], [])
    for path in ("src/a.py", "crlf", "latin1", "a file ü", "untracked", "setup.cfg", "moved", "run", "empty"):
        assert content(fresh, path) == content(agent, path), path
    assert content(fresh, "ignored") is None
    assert Path(fresh.cwd, "run").stat().st_mode & 0o111
    assert Path(fresh.cwd, "link").is_symlink()


def test_a_change_in_the_second_of_the_commit_that_keeps_the_size_is_found(local_workspace: LocalWorkspace) -> None:
    commit = "git -c user.name=a -c user.email=a@b commit -qm base"
    local_workspace.run(f"echo a >a; git init -q; git add a; {commit}; echo b >a; touch -r .git/index a")
    local_workspace.base_tree = "HEAD"
    local_workspace.run("sleep 1.1")
    assert "+b" in collect_patch(local_workspace)


def test_binary_files_are_left_out(workspaces: tuple[LocalWorkspace, LocalWorkspace]) -> None:
    agent, fresh = workspaces
    agent.run("printf 'a\\0b' >binary; echo two >src/a.py; printf '\\0' >zzz; printf '\\0' >>crlf")
    patch = collect_patch(agent)
    assert changed_paths(patch) == ["src/a.py"]
    assert apply_patch(fresh, patch, [])
    assert content(fresh, "src/a.py") == b"two\n"


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit patches to 1 MiB in place of 16, which takes git seconds."""
    monkeypatch.setattr("skyrl_agent.tasks.patches.MAX_FILE_BYTES", 1 << 20)


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize(
    ("change", "n_kept"),
    [
        ("yes 'a line of a lock file' | head -c 1200000 >lock.json; git add lock.json", 1),
        ("yes data | head -c 2600000 >dump.txt; yes data | head -c 1100000 >'src/b ü.txt'", 1),
        ("for i in $(seq 20); do yes $i | head -c 62000 >part$i; done", 11),
    ],
    ids=["one", "two", "many"],
)
def test_files_that_make_a_patch_too_large_are_left_out(
    workspaces: tuple[LocalWorkspace, LocalWorkspace], change: str, n_kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The fix is kept: files count from the smallest on, until the patch has reached the limit."""
    agent, fresh = workspaces
    agent.run(
        f"echo two >src/a.py; {change}; printf '%s\\n' 'diff --git a/x b/x' 'Binary files a and b differ' >>src/a.py"
    )
    patch = collect_patch(agent)
    assert len(patch.encode()) <= 1 << 20
    assert "left out: diff --git a/" in caplog.text
    assert len(changed_paths(patch)) >= n_kept
    assert apply_patch(fresh, patch, [])
    assert content(fresh, "src/a.py") == b"two\ndiff --git a/x b/x\nBinary files a and b differ\n"


@pytest.mark.usefixtures("low_limit")
def test_a_large_file_that_is_removed_or_rewritten_costs_no_other_change(
    workspaces: tuple[LocalWorkspace, LocalWorkspace],
) -> None:
    agent, fresh = workspaces
    for workspace in workspaces:
        workspace.run("yes old | head -c 1200000 | tee lock >big")
    record_base(agent)
    agent.run("echo two >src/a.py; yes new | head -c 1200000 >lock; rm big")
    assert apply_patch(fresh, collect_patch(agent), [])
    assert content(fresh, "src/a.py") == b"two\n"
    assert (content(fresh, "lock") or b"")[:4] == b"old\n"


@pytest.mark.parametrize(
    "damage", ["rm -rf .git", "rm -rf .git; git init -q", "echo broken >.git/HEAD", 'rm -rf "$PWD"', "mkfifo pipe"]
)
def test_a_damaged_repository_is_no_failure_of_the_machine(
    workspaces: tuple[LocalWorkspace, LocalWorkspace], damage: str
) -> None:
    agent, _ = workspaces
    agent.execute(damage, 30)
    assert collect_patch(agent) == ""


def test_a_repository_inside_the_repository_does_not_hide_other_changes(
    workspaces: tuple[LocalWorkspace, LocalWorkspace],
) -> None:
    agent, fresh = workspaces
    agent.run("git init -q empty; git init -q full; cd full; echo x >x; git add -A")
    agent.run("cd full; git -c user.name=a -c user.email=a@b commit -qm x; cd ..; echo two >src/a.py")
    assert apply_patch(fresh, collect_patch(agent), [])
    assert content(fresh, "src/a.py") == b"two\n"


def test_a_workspace_without_a_repository_is_a_failure(
    workspaces: tuple[LocalWorkspace, LocalWorkspace], local_workspace: LocalWorkspace
) -> None:
    agent, fresh = workspaces
    agent.close()
    fresh.close()
    with pytest.raises(WorkspaceError):
        collect_patch(agent)
    with pytest.raises(WorkspaceError):
        apply_patch(fresh, "diff", [])
    with pytest.raises(WorkspaceError, match="not a git repository"):
        record_base(local_workspace)
    with pytest.raises(WorkspaceError, match="cannot be patched"):
        apply_patch(local_workspace, "diff", [])


@pytest.mark.parametrize(
    "patch",
    [
        "no patch at all",
        "diff --git a/src/a.py b/src/a.py\n--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-wrong\n+two\n",
        "diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
        "diff --git a/.git/hooks/x b/.git/hooks/x\nnew file mode 100755\n--- /dev/null\n+++ b/.git/hooks/x\n"
        "@@ -0,0 +1 @@\n+x\n",
    ],
    ids=["text", "context", "outside", "hook"],
)
def test_patches_that_do_not_apply_change_nothing(
    workspaces: tuple[LocalWorkspace, LocalWorkspace], patch: str
) -> None:
    _, fresh = workspaces
    assert not apply_patch(fresh, patch, [])
    assert content(fresh, "src/a.py") == b"one\ndirty\n"
    assert not Path(fresh.cwd).parent.joinpath("x").exists()
    assert content(fresh, ".git/hooks/x") is None


TESTS = ["tests/test_a.py", "tests/test_new.py", "checks/deep/test_b.py"]


@pytest.mark.parametrize(
    "attack",
    [
        "echo passes >tests/test_a.py",
        "rm tests/test_a.py",
        "rm -r tests; ln -s src tests",
        "rm -r tests; echo file >tests",
        "git mv tests/test_a.py src/test_a.py",
        "echo passes >tests/test_new.py",
        "echo import os >conftest.py; mkdir -p a/b; cp conftest.py a/b; echo conftest.py >.gitignore; git add -f .",
        "echo x >src/sitecustomize.py; echo x >evil.pth; echo x >pytest.py; mkdir pytest; echo x >pytest/__main__.py",
        "echo '[tool:pytest]' >setup.cfg; echo '[pytest]' >tox.ini; echo x >pyproject.toml; echo x >src/pytest.ini",
        "mkdir -p checks/deep; echo passes >checks/deep/test_b.py",
        "mkdir src/deep; echo passes >src/deep/test_b.py; ln -s src checks",
        "mkdir checks; echo x >src/test_b.py; ln -s ../src checks/deep",
        "mkdir -p checks/deep; ln -s ../../src/a.py checks/deep/test_b.py",
        "echo 'tests/* eol=crlf' >.gitattributes; echo passes >tests/test_a.py",
    ],
)
def test_patches_cannot_change_tests(workspaces: tuple[LocalWorkspace, LocalWorkspace], attack: str) -> None:
    agent, fresh = workspaces
    agent.run(f"{attack}\necho two >src/a.py")
    agent.execute("echo again >src/a.py; git add -A -f; git -c user.name=a -c user.email=a@b commit -qm mine", 30)
    assert apply_patch(fresh, collect_patch(agent), TESTS)
    assert content(fresh, "src/a.py") == b"again\n"
    assert (content(fresh, "tests/test_a.py") or b"").strip() == b"old"
    assert content(fresh, "setup.cfg") == b"x\n"
    for path in ("tests/test_new.py", "checks/deep/test_b.py"):
        assert content(fresh, path) is None
    for name in ("conftest.py", "sitecustomize.py", "*.pth", "pytest*", "tox.ini", "pyproject.toml"):
        assert not list(Path(fresh.cwd).rglob(name))
    for path in TESTS:
        fresh.write_bytes(path, b"from the row")
        assert Path(fresh.cwd, path).resolve() == Path(fresh.cwd, path)
    assert content(fresh, "src/a.py") == b"again\n"
