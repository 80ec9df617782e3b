"""Measure the processor time of each test, and print where it goes.

As a pytest plugin (`-p costs --costs FILE`) it appends one JSON line per test to FILE. As a program it reads that file:

    make test-costs                    # runs the tests, then prints the tables of docs/internals/tests.md
    python dev/costs.py FILE --top 50

Processor time depends little on other load, unlike wall time, so two runs can be compared on a shared machine. All
descendants of the process count, running ones too, except those that another process has adopted (a Ray cluster). A
fixture of a module or session counts for the first test that uses it.
"""

import argparse
import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Cost:
    """Resources that one test used, with its fixtures."""

    test: str
    """Node id, e.g. `skyrl-train/tests/cpu/test_trainer.py::test_a_step`."""
    worker: str
    own_s: float
    """Processor seconds of the process that ran the test."""
    children_s: float
    """Processor seconds of the processes that it started, and that they started."""
    wall_s: float
    peak_gb: float
    """Peak memory of the process so far."""

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def cpu_s(self) -> float:
        return self.own_s + self.children_s


def _processor_seconds() -> tuple[float, float]:
    """Return the seconds of this process, and of its descendants."""
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, reaped.ru_utime + reaped.ru_stime + _running_descendants("self")


def _running_descendants(pid: str) -> float:
    """Return the seconds of the running descendants of a process, and of the children that they have reaped."""
    seconds = 0.0
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # ended meanwhile
            for child in tasks.read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + _running_descendants(child)
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", type=Path, help="append the processor time of each test to this file")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Record the cost of a test, from the set-up of its fixtures to their removal."""
    file: Path | None = item.config.getoption("--costs")
    if file is None:
        return (yield)
    (own, children), start = _processor_seconds(), time.monotonic()
    result = yield
    own_after, children_after = _processor_seconds()
    cost = Cost(
        test=item.nodeid,
        worker=os.environ.get("PYTEST_XDIST_WORKER", "main"),
        own_s=round(own_after - own, 3),
        children_s=round(children_after - children, 3),
        wall_s=round(time.monotonic() - start, 3),
        peak_gb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    )
    with file.open("a") as lines:  # one write per line, so workers can share the file
        lines.write(json.dumps(asdict(cost)) + "\n")
    return result


def _table(title: str, costs: Iterable[tuple[str, list[Cost]]], total_s: float) -> list[str]:
    rows = sorted(((sum(cost.cpu_s for cost in group), name, group) for name, group in costs), reverse=True)
    lines = [f"| {title} | tests | processor s | share | of it in child processes |", "| --- | --: | --: | --: | --: |"]
    for cpu_s, name, group in rows:
        children = sum(cost.children_s for cost in group) / max(cpu_s, 1e-9)
        lines.append(f"| `{name}` | {len(group)} | {cpu_s:.0f} | {cpu_s / total_s:.1%} | {children:.0%} |")
    return lines


def _group(costs: list[Cost], depth: int | None) -> Iterable[tuple[str, list[Cost]]]:
    """Group tests by the first `depth` parts of their path, or by file."""
    groups: dict[str, list[Cost]] = defaultdict(list)
    for cost in costs:
        parts = Path(cost.file).parts
        groups["/".join(parts[:depth] if depth and len(parts) > depth else parts)].append(cost)
    return groups.items()


def format_report(costs: list[Cost], top: int) -> str:
    """Return Markdown tables of processor time by folder, file and test."""
    total_s = sum(cost.cpu_s for cost in costs)
    by_cost = sorted(costs, key=lambda cost: cost.cpu_s, reverse=True)
    shares = [
        f"{n:,} tests: {sum(c.cpu_s for c in by_cost[:n]) / total_s:.0%}" for n in (100, 200, 1000) if n < len(costs)
    ]
    lines = [
        f"{len(costs):,} tests, {total_s / 60:.1f} processor minutes; the most expensive {', '.join(shares)}.",
        f"Peak memory of a worker: {max(cost.peak_gb for cost in costs):.1f} GB.",
        "",
        *_table("folder", _group(costs, 4), total_s),
        "",
        *_table("file", _group(costs, None), total_s)[: top + 2],
        "",
        "| test | processor s | wall s |",
        "| --- | --: | --: |",
        *(f"| `{cost.test}` | {cost.cpu_s:.1f} | {cost.wall_s:.1f} |" for cost in by_cost[:top]),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--top", type=int, default=30, help="rows of the tables of files and tests")
    args = parser.parse_args()
    print(format_report([Cost(**json.loads(line)) for line in args.file.read_text().splitlines()], args.top))


if __name__ == "__main__":
    main()
