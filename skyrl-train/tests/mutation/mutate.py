"""Mutation testing of the mathematics: inject faults one at a time, and count those that a test catches.

Faults are sampled with a fixed seed, evenly over the source files. Each is written into a copy of the package; the
tests of its module run there, then the gradient specification, until one fails. Survivors that change no behaviour are
listed with their reason in `equivalent.json`. Exits with status 1 if less than 95% of the other faults are caught.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
import torch

TRAIN = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.json")
REQUIRED_SHARE = 0.95
TIMEOUT_S = 300

SOURCES = ("algorithms", "workers", "dataset/batch.py", "models/logprobs.py", "learner.py")
SPECIFICATION = "workers/test_gradient_specification.py"
TESTS = {
    "algorithms/advantages/": ("algorithms/advantages", "algorithms/test_trajectories.py", SPECIFICATION),
    "algorithms/losses/": ("algorithms/losses", SPECIFICATION, "workers/test_critic.py"),
    "algorithms/objectives/": (
        SPECIFICATION,
        "algorithms/objectives",
        "workers/test_objective.py",
        "workers/test_critic.py",
    ),
    "algorithms/": ("algorithms", "config/test_algorithm_rules.py", SPECIFICATION),
    "dataset/batch.py": ("dataset/test_batch.py", SPECIFICATION),
    "models/logprobs.py": ("models/test_logprobs.py", SPECIFICATION),
    "workers/": ("workers", "checkpoint", "distributed"),
    "learner.py": ("test_learner.py", SPECIFICATION, "test_trainer.py"),
}
"""Tests of each source folder or file, under `tests/cpu`; the first prefix that fits counts, missing paths do not."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"}
FLIPPED = {"any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """One change of one source line, e.g. `+ → -`."""

    path: str
    """Path of the file under `skyrl_train`."""
    line: int
    text: str
    """The original line."""
    change: str
    source: str
    """The whole file with the fault."""

    @property
    def key(self) -> tuple[str, str, str]:
        """File, original line and change, which identify the fault while the line exists."""
        return self.path, self.text, self.change


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:  # noqa: C901, one case for each kind of fault
    """Yield each faulty version of one node, without its position, and a description of the change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            other = COMPARISONS[type(op)]
            yield f"{type(op).__name__} → {other.__name__}", ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_annotation(node):
            swapped = OPERATORS[type(op)]
            yield f"{type(op).__name__} → {swapped.__name__}", ast.BinOp(node.left, swapped(), node.right)
        case ast.BoolOp(op=op):
            junction = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} → {type(junction).__name__}", ast.BoolOp(junction, node.values)
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield f"drop {type(node.op).__name__}", node.operand
        case ast.Name(id=name) if name in NAMES | FLIPPED:
            yield f"{name} → {(NAMES | FLIPPED)[name]}", ast.Name((NAMES | FLIPPED)[name], node.ctx)
        case ast.Attribute(attr=name) if name in NAMES | FLIPPED:
            swapped_name = (NAMES | FLIPPED)[name]
            yield f".{name} → .{swapped_name}", ast.Attribute(node.value, swapped_name, node.ctx)
        case ast.keyword(arg="min" | "max" as name):
            yield f"{name}= → {NAMES[name]}=", ast.keyword(NAMES[name], node.value)
        case ast.Constant(value=bool() as value):
            yield f"{value} → {not value}", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield f"{value} → {value + 1}", ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield f"{value} → {value + 1}", ast.Constant(value + 1)
        case ast.Call(func=ast.Attribute(attr="detach" | "clamp" | "abs" | "clone" as name)):
            yield f"drop .{name}()", node.func.value
        case ast.Return(value=ast.Call(args=[first, *_])) if not isinstance(first, ast.Starred):
            yield "return the first argument", ast.Return(first)
        case ast.If():
            yield "negate if", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop the statement", ast.Pass()


def _is_annotation(node: ast.BinOp) -> bool:
    """Return True for unions of types and of `None`, which no test executes."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.Constant) and side.value is None for side in sides) or all(
        isinstance(side, ast.Name) and side.id[0].isupper() for side in sides
    )


def _executed(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield parent, field, index and node of every part of the tree but annotations, assertions and error messages."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Assert | ast.Raise):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, ast.AST):
                yield tree, field, index if isinstance(value, list) else None, child
                yield from _executed(child)


def faults_of(path: Path, root: Path) -> list[Fault]:
    """Return every fault of a source file."""
    source = path.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    faults = []
    for parent, field, index, node in _executed(tree):
        for change, variant in variants(node):
            if isinstance(parent, ast.JoinedStr | ast.FormattedValue):
                continue
            line = getattr(node, "lineno", 0)
            container = getattr(parent, field)
            _put(parent, field, index, ast.fix_missing_locations(ast.copy_location(copy.deepcopy(variant), node)))
            text = lines[line - 1].strip()
            faults.append(Fault(path.relative_to(root).as_posix(), line, text, change, ast.unparse(tree)))
            setattr(parent, field, container) if index is None else _put(parent, field, index, node)
    return faults


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def sample(faults: Sequence[Sequence[Fault]], n: int, seed: int) -> list[Fault]:
    """Return `n` faults, one from each file in turn, so that small files are not left out."""
    shuffled = (
        random.Random(f"{seed} {of_file[0].path}").sample(of_file, len(of_file)) for of_file in faults if of_file
    )
    queues = list(shuffled)
    chosen: list[Fault] = []
    while queues and len(chosen) < n:
        chosen += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return sorted(chosen[:n], key=lambda fault: (fault.path, fault.line, fault.change))


def run_tests(fault: Fault, workplace: Path, timeout_s: float) -> str | None:
    """Return the first test that fails with the fault in the copy of the package, or None if all pass."""
    target = workplace / "skyrl_train" / fault.path
    original = target.read_text()
    paths = next(paths for prefix, paths in TESTS.items() if fault.path.startswith(prefix))
    existing = [
        workplace / "tests/cpu" / path for path in dict.fromkeys(paths) if (workplace / "tests/cpu" / path).exists()
    ]
    times = target.stat()
    target.write_text(fault.source)
    report = workplace / "report.txt"
    arguments = ["-qx", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", f"--rootdir={workplace.parent}"]
    child = os.fork()
    if child == 0:
        _become_pytest([*arguments, *map(str, existing)], workplace, report)
    try:
        status = _wait(child, timeout_s)
    finally:
        target.write_text(original)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))  # its bytecode is valid again
    if status is None:
        return "timeout"
    if status == 0:
        return None
    failed = [line for line in report.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].rpartition("/")[2].split(" - ")[0] if failed else f"pytest exits with {status}"


def _become_pytest(arguments: list[str], workplace: Path, report: Path) -> NoReturn:
    """Run pytest in a forked process, which inherits the imports of `import_everything`."""
    os.setsid()
    output = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status: int = 70
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def import_everything(workplace: Path) -> None:
    """Import third-party modules once, and compile the copy: collect its tests, then forget its own modules."""
    os.chdir(workplace.parent)
    paths = [str(workplace), str(TRAIN.parent / "skyrl-gym")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the ranks, which are other processes
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(workplace / "tests/cpu")])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith((str(workplace.parent), *paths)) and name != "__main__":
            del sys.modules[name]
    sys.dont_write_bytecode = True


def _wait(child: int, timeout_s: float) -> int | None:
    """Return the exit status of a process, or kill its session and return None."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def copy_package(folder: Path) -> Path:
    """Copy the package and its tests with their pytest configuration; return the copy's `skyrl-train`."""
    ignore = shutil.ignore_patterns("__pycache__", ".*", "outputs")
    for name in ("skyrl_train", "tests", "examples"):
        shutil.copytree(TRAIN / name, folder / TRAIN.name / name, ignore=ignore)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(TRAIN.parent / name, folder / name)
    shutil.copy(TRAIN / "pyproject.toml", folder / TRAIN.name / "pyproject.toml")
    return folder / TRAIN.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of source paths, e.g. algorithms/losses")
    parser.add_argument("--max", type=int, default=200, help="faults to inject")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    package = TRAIN / "skyrl_train"
    paths = [path for name in SOURCES for path in sorted((package / name).rglob("*.py")) or [package / name]]
    chosen = [path for path in paths if path.relative_to(package).as_posix().startswith(tuple(args.only))]
    faults = sample([faults_of(path, package) for path in chosen], args.max, args.seed)
    reasons = {(e["file"], e["line"], e["fault"]): e["reason"] for e in json.loads(EQUIVALENT.read_text())}
    n_caught = n_equivalent = 0
    with tempfile.TemporaryDirectory() as folder:
        workplace = copy_package(Path(folder))
        import_everything(workplace)
        for number, fault in enumerate(faults, 1):
            start = time.monotonic()
            reason = reasons.get(fault.key)
            failed = None if reason else run_tests(fault, workplace, TIMEOUT_S)
            n_caught, n_equivalent = n_caught + bool(failed), n_equivalent + bool(reason)
            outcome = "equivalent" if reason else "caught" if failed else "SURVIVED"
            place = f"{fault.path}:{fault.line}"
            seconds = time.monotonic() - start
            detail = reason or failed or fault.text
            print(
                f"{number:3}/{len(faults)} {outcome:10} {place:38} {fault.change:26} {seconds:4.0f} s  {detail}",
                flush=True,
            )
    n_counted = len(faults) - n_equivalent
    share = n_caught / n_counted if n_counted else 1.0
    print(f"{n_caught} of {n_counted} faults caught ({share:.1%}); {n_equivalent} more are equivalent")
    return int(share < REQUIRED_SHARE)


if __name__ == "__main__":
    sys.exit(main())
