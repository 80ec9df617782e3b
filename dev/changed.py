"""Print the test files that a change can break, nearest first: `make test-changed`.

A test file is selected if it changed, if it mirrors a changed module, or if it imports a changed module through at most
`--depth` modules. Almost everything imports almost everything else in the end, so an unbounded search would select all
tests for a change in any module; the number of files beyond the limit is printed. Packages that only re-export
(`__init__.py`) do not count as a step. A changed file that is not Python selects the tests beside which it lies, or the
tests that name it.

    python dev/changed.py                  # changes since the branch left main, uncommitted ones included
    python dev/changed.py --base HEAD~3 --depth 2
"""

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "skyrl": "skyrl-train",
    "skyrl_agent": "skyrl-agent",
    "skyrl_gym": "skyrl-gym",
    "skyrl_report": "skyrl-report",
    "skyrl_train": "skyrl-train",
    "tx": "skyrl-tx",
}
LOOSE_FOLDERS = ("skyrl-agent/examples", "skyrl-train/examples", "skyrl-train/integrations", "veritas-rl")
"""Folders of modules that no package contains."""

TEST_FOLDERS = (
    *("skyrl-agent/tests", "skyrl-gym/tests", "skyrl-report/tests"),
    *("skyrl-train/tests/cpu", "skyrl-tx/tests", "veritas-rl/tests"),
)
SEPARATE = {"npm", "openenv_server", "recipes", "sdk", "verifiers_v0", "vllm_server"}
"""Folders of tests that need other environments."""


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()


def changed_paths(base: str | None) -> set[str]:
    """Return the files that differ from `base` (default: where this branch left main), committed or not."""
    if base is None:
        base = git("merge-base", "HEAD", "main")[0]
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def module_of(path: str) -> str | None:
    """Return the name under which a Python file is imported, e.g. `skyrl_train.trainer`."""
    if not path.endswith(".py"):
        return None
    parts = list(Path(path).with_suffix("").parts)
    if "kit" in parts[:3]:
        parts = parts[parts.index("kit") + 1 :]
    elif parts[:2] == ["skyrl-agent", "examples"]:
        parts = parts[2:]
    elif "tests" in parts:
        return None
    else:
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def mirror_of(path: str) -> str:
    """Return the end of the path of a module's own test file, e.g. `/tracking/test_jsonl.py`."""
    inner = Path(*Path(path).parts[2:] or [Path(path).name])
    return f"/{inner.with_name(f'test_{inner.name}').as_posix()}"


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return what a file imports: modules, and `module.name` for each name, which may be a module as well."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def importers() -> tuple[dict[str, set[str]], set[str]]:
    """Return the modules that import each module, the examples and test kits among them, and the names of packages."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    result = defaultdict(set)
    packages = set()
    for name in graph.modules:
        result[name] |= graph.find_modules_that_directly_import(name)
        packages |= {name} if graph.find_children(name) else set()
    for folder in (*LOOSE_FOLDERS, *(f"{folder.removesuffix('/cpu')}/kit" for folder in TEST_FOLDERS)):
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            if module := module_of(relative):
                for name in imports_of(path):
                    result[name].add(module)
    return result, packages


def distances(changed: Iterable[str]) -> dict[str, int]:
    """Return the number of imports between each module and the nearest changed one."""
    importing, packages = importers()
    found = dict.fromkeys(changed, 0)
    ring = list(found)
    while ring:
        following: list[str] = []
        for module in ring:  # grows: a re-export belongs to the same ring
            for importer in importing[module] - found.keys():
                is_reexport = importer in packages
                found[importer] = found[module] + (not is_reexport)
                (ring if is_reexport else following).append(importer)
        ring = following
    return found


def test_files() -> Iterator[Path]:
    """Yield the files that `make test` collects."""
    for folder in TEST_FOLDERS:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            if not SEPARATE & set(path.parts):
                yield path


def select(changed: set[str]) -> dict[Path, int]:
    """Return the distance of each test file that a change can reach."""
    modules = distances(filter(None, map(module_of, changed)))
    others = [Path(path) for path in changed if module_of(path) is None]
    mirrors = {mirror_of(path) for path in changed if module_of(path)}
    selected: dict[Path, int] = {}
    for path in test_files():
        relative = path.relative_to(ROOT)
        reached = [modules[name] for name in imports_of(path) if name in modules]
        if relative.as_posix() in changed or relative.as_posix().endswith(tuple(mirrors)):
            reached.append(0)
        text = path.read_text() if others else ""
        for other in others:
            is_beside = "tests" in other.parts and other.parent in relative.parents  # a conftest, data, a golden file
            is_page = other.parts[0] == "docs" and "test_docs" in path.name
            if is_beside or is_page or (other.suffix != ".py" and other.name in text):
                reached.append(0)
        if reached:
            selected[relative] = min(reached)
    return selected


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", help="a commit; by default, the one at which this branch left main")
    parser.add_argument("--depth", type=int, default=1, help="imports between a test and a changed module")
    args = parser.parse_args()
    changed = changed_paths(args.base)
    distance = select(changed)
    chosen = sorted(
        (path for path in distance if distance[path] <= args.depth), key=lambda path: (distance[path], path)
    )
    sys.stderr.write(
        f"test-changed: {len(changed)} changed files, {len(chosen)} test files at most {args.depth} imports away; "
        f"{len(distance) - len(chosen)} farther ones are left to make test\n"
    )
    print("\n".join(map(str, chosen)))


if __name__ == "__main__":
    main()
