"""Mutation testing of the algorithms: inject faults one at a time, and count those that a test catches.

Faults are sampled with a fixed seed, evenly over the source files. Each is written into a copy of the package, where
the tests of its module run, then the gradient specification, until one fails. Survivors that do not change behavior
are listed with their reason in `equivalent.json`. The exit status is 1 if less than 95% of the other faults are caught.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from faults import Fault, faults_of

TRAIN = Path(__file__).resolve().parents[2] / "skyrl-train"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
REQUIRED_SHARE = 0.95
TIMEOUT_S = 300

SOURCES = (
    "algorithms",
    "workers",
    "launch/lease.py",
    "launch/weight_syncs.py",
    "dataset/batch.py",
    "models/logprobs.py",
    "models/linear_head.py",
    "models/routing.py",
    "learner.py",
    "trainer.py",
)
SPECIFICATION = "workers/test_gradient_specification.py"
RUNS = ("test_trainer.py", *(f"runs/test_{name}.py" for name in ("divergence", "checkpoints", "algorithms", "resume")))
TESTS = {
    "algorithms/advantages/": ("algorithms/advantages", "algorithms/test_inputs.py", SPECIFICATION),
    "algorithms/losses/": ("algorithms/losses", SPECIFICATION, "workers/test_worker_critic.py"),
    "algorithms/objectives/": (
        SPECIFICATION,
        "algorithms/objectives",
        "workers/test_worker_losses.py",
        "workers/test_worker_critic.py",
        "entrypoints/test_preferences.py",
    ),
    "algorithms/reward_pipeline.py": ("generators", SPECIFICATION),
    "algorithms/": ("algorithms", "config/rules/test_algorithm.py", SPECIFICATION),
    "dataset/batch.py": ("dataset/test_batch.py", SPECIFICATION),
    "models/linear_head.py": ("models/test_linear_head.py", "models/test_logprobs.py", "distributed/test_strategy.py"),
    "models/routing.py": (),
    "models/logprobs.py": ("models/test_logprobs.py", SPECIFICATION),
    "workers/": ("workers", "checkpoint", "distributed"),
    "launch/": ("launch", "runs/test_weight_check.py", "runs/test_fully_async.py"),
    "learner.py": ("test_learner.py", SPECIFICATION, *RUNS),
    "trainer.py": RUNS,
}
"""Tests under `tests/cpu` for the first matching prefix; they run after the test file that mirrors the source file."""


def sample(faults: Sequence[Sequence[Fault]], n: int, seed: int) -> list[Fault]:
    """Return `n` faults, taken from the files in turn so that small files are represented."""
    shuffled = (
        random.Random(f"{seed} {file_faults[0].path}").sample(file_faults, len(file_faults))
        for file_faults in faults
        if file_faults
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
    own = Path(fault.path).with_name(f"test_{Path(fault.path).name}").as_posix()
    candidates = [workplace / "tests/cpu" / path for path in dict.fromkeys((own, *paths))]
    existing = [path for path in candidates if path.exists()]
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
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))  # makes its bytecode valid again
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
    """Import third-party modules once and compile the copy: collect its tests, then drop its modules."""
    os.chdir(workplace.parent)
    paths = [str(workplace), *(str(TRAIN.parent / package) for package in ("skyrl-gym", "skyrl-report"))]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # for the rank processes
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
    equivalent = json.loads(EQUIVALENT.read_text())
    for entry in equivalent:
        if entry["line"] not in map(str.strip, (package / entry["file"]).read_text("utf-8").splitlines()):
            raise SystemExit(f"{EQUIVALENT.name}: {entry['file']} has no line {entry['line']!r}; correct the entry")
    reasons = {(e["file"], e["line"], e["fault"]): e["reason"] for e in equivalent}
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
            location = f"{fault.path}:{fault.line}"
            seconds = time.monotonic() - start
            detail = reason or failed or fault.text
            print(
                f"{number:3}/{len(faults)} {outcome:10} {location:38} {fault.change:26} {seconds:4.0f} s  {detail}",
                flush=True,
            )
    n_counted = len(faults) - n_equivalent
    share = n_caught / n_counted if n_counted else 1.0
    print(f"{n_caught} of {n_counted} faults caught ({share:.1%}); {n_equivalent} are equivalent")
    return int(share < REQUIRED_SHARE)


if __name__ == "__main__":
    sys.exit(main())
