"""Patches of repositories: collect what an agent changed, and apply it to a fresh copy."""

import logging
import re
import shlex
from collections.abc import Iterable
from itertools import pairwise
from pathlib import PurePosixPath

from skyrl_agent.workspaces import MAX_FILE_BYTES, Workspace, WorkspaceError

logger = logging.getLogger(__name__)

GIT_TIMEOUT_S = 300.0
MAX_COPIES = 500  # per command: its limit is 90,000 bytes

PROTECTED = (
    "**/tests/**",
    "**/conftest.py",
    "**/pytest.ini",
    "**/.pytest.ini",
    "**/sitecustomize.py",
    "**/usercustomize.py",
    "**/*.pth",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    "bin/test",
    "pytest.py",
    "pytest/**",
    "_pytest/**",
    "unittest.py",
    "unittest/**",
)
"""Files that control how tests run. Patches cannot change them: they are reset before the tests.

SWE-bench puts all changes under a `tests` folder into the test patch, so reference solutions contain none.
"""

DOES_NOT_APPLY = 71  # exit status

GIT = "git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null"

ADD_ALL = f"""folder=$(mktemp -d) && cp -p "$({GIT} rev-parse --git-path index)" "$folder/index"
export GIT_INDEX_FILE="$folder/index"
{GIT} add -A --ignore-errors >/dev/null
"""
"""Command: stage all files in a separate index, so that the agent's index does not change.

The copy keeps the index's timestamp: git compares the content of files that are not older than the index, because they
may have changed without a change in size or time.
"""

RECORD = f"""{GIT} rev-parse --git-dir || exit
{ADD_ALL}
{GIT} write-tree && rm -rf "$folder"
"""

COLLECT = f"""{ADD_ALL}
{GIT} diff --cached --no-color --no-ext-diff --no-textconv --no-renames --no-relative --ignore-submodules=all \
--src-prefix=a/ --dst-prefix=b/ {{base}} >"$folder/patch" && printf '\\n%s' "$folder"
"""

APPLY = f"""{GIT} add -A --ignore-errors && base=$({GIT} write-tree) || exit 70
{GIT} apply --index --whitespace=nowarn {{folder}}/patch || exit {DOES_NOT_APPLY}
{GIT} diff --cached --name-only --no-renames -z $base -- {{protected}} >{{folder}}/paths || exit 70
if [ -s {{folder}}/paths ]; then GIT_LITERAL_PATHSPECS=1 {GIT} restore --source=$base --staged --worktree \
--pathspec-from-file={{folder}}/paths --pathspec-file-nul || exit 70; fi
"""
"""Command: apply a patch, then restore the protected files. Git removes new files, and links in place of folders."""


def record_base(workspace: Workspace) -> None:
    """Record the state of the repository in `cwd`, including uncommitted changes and files."""
    workspace.base_tree = workspace.run(RECORD, GIT_TIMEOUT_S).strip().rpartition("\n")[2]


def collect_patch(workspace: Workspace) -> str:
    """Return the changes since `record_base`, committed or not, as a patch without binary files.

    Ignored files are left out. If the patch exceeds 16 MiB, its largest files are also left out, such as a
    package manager's lock file. The patch is empty if the agent has destroyed the repository. Bytes that are not UTF-8
    become surrogates (PEP 383).

    Raises:
        WorkspaceError: the workspace does not respond.
    """
    result = workspace.execute(COLLECT.format(base=workspace.base_tree), GIT_TIMEOUT_S)
    if result.status != 0:
        workspace.execute("true", GIT_TIMEOUT_S)  # raises if the workspace has failed
        logger.warning("the patch is empty: git failed with status %s: %s", result.status, result.output[-500:])
        return ""
    folder = result.output.rpartition("\n")[2]
    try:
        _leave_out_largest(workspace, f"{folder}/patch")
        patch = workspace.read_bytes(f"{folder}/patch")
    except OSError as error:
        logger.warning("the patch is empty: %s", error)
        return ""
    finally:
        workspace.execute(f"rm -rf {shlex.quote(folder)}", GIT_TIMEOUT_S)
    return remove_binary_diffs(patch.decode("utf-8", "surrogateescape"))


def _leave_out_largest(workspace: Workspace, path: str) -> None:
    """Shorten a patch in a workspace to `MAX_FILE_BYTES`. Keep the smallest files and log up to ten of the rest.

    The patch may be too large to read, so grep finds git's headers inside the workspace. Content lines cannot look
    like headers: they begin with a space, "+", "-" or a backslash.
    """
    quoted = shlex.quote(path)
    n_bytes = int(workspace.run(f"wc -c <{quoted}"))
    if n_bytes <= MAX_FILE_BYTES:
        return
    headers = workspace.run(f"LC_ALL=C grep -ab '^diff --git ' {quoted}", max_bytes=MAX_FILE_BYTES).splitlines()
    starts = [int(header.partition(":")[0]) for header in headers]
    sizes = [end - start for start, end in pairwise([*starts, n_bytes])]
    left_out, n_kept = set(range(len(sizes))), 0
    for i in sorted(left_out, key=sizes.__getitem__):
        n_kept += sizes[i]
        if n_kept > MAX_FILE_BYTES:
            break
        left_out.discard(i)
    kept = [i for i in range(len(sizes)) if i not in left_out]
    for first in range(0, len(kept), MAX_COPIES):
        copies = (f"tail -c +{starts[i] + 1} {quoted} | head -c {sizes[i]}" for i in kept[first : first + MAX_COPIES])
        workspace.run(f"{{ {'; '.join(copies)}; }} >>{quoted}.kept", GIT_TIMEOUT_S)
    workspace.run(f"touch {quoted}.kept && mv {quoted}.kept {quoted}")
    logger.warning(
        "the patch has %.1f MiB, and the limit is %d; left out: %s",
        *(n_bytes / 2**20, MAX_FILE_BYTES >> 20),
        ", ".join(f"{headers[i].partition(':')[2]} ({sizes[i]:,} bytes)" for i in sorted(left_out)[:10]),
    )


def remove_binary_diffs(patch: str) -> str:
    """Return a patch without the files that git considers binary."""
    sections = re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE)
    return "".join(s for s in sections if not re.search(r"^(Binary files |GIT binary patch)", s, re.MULTILINE))


def changed_paths(patch: str) -> list[str]:
    """Return the paths of files that a patch changes, creates or deletes."""
    return sorted({match.rstrip("\t\r") for match in re.findall(r"^(?:---|\+\+\+) [ab]/(.+)$", patch, re.MULTILINE)})


def apply_patch(
    workspace: Workspace, patch: str, test_paths: Iterable[str], protected: Iterable[str] = PROTECTED
) -> bool:
    """Apply a patch in a fresh workspace, except its changes to tests. Return False if it does not apply.

    Args:
        test_paths: the paths of test files. They are reset, or removed if they are new.
        protected: glob patterns of more files to reset.

    Raises:
        WorkspaceError: the repository cannot be patched at all.
    """
    content = patch.encode("utf-8", "surrogateescape")
    if len(content) > MAX_FILE_BYTES:
        return False
    tests = list(test_paths)
    pathspecs = [f":(glob){pattern}" for pattern in protected] + [f":(literal){path}" for path in tests]
    pathspecs.append(":(literal).git")  # matches nothing. Without a pathspec, git would select all files.
    folder = workspace.run("mktemp -d").strip()
    workspace.write_bytes(f"{folder}/patch", content)
    result = workspace.execute(APPLY.format(folder=folder, protected=shlex.join(pathspecs)), GIT_TIMEOUT_S)
    if result.status not in (0, DOES_NOT_APPLY):
        raise WorkspaceError(f"the repository cannot be patched: status {result.status}: {result.output[-500:]}")
    folders = {str(folder) for path in tests for folder in PurePosixPath(path).parents} - {"."}
    if folders:  # links that replace them would move the tests to the wrong place
        workspace.run(
            f'for folder in {shlex.join(sorted(folders))}; do if [ -L "$folder" ]; then rm "$folder"; fi; done'
        )
    return result.status == 0
