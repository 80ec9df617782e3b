"""Run the tests in `client` with each SDK in its own environment, and compare the results with `compatibility.md`."""

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from tx_kit.sdk import SDK_TESTS, SECONDS, VERSIONS, processes_with, python, run_client

TABLE = SDK_TESTS / "compatibility.md"
MARKS = {"passed": "✓", "pytest.skip": "no such call", "pytest.xfail": "fails in the SDK"}


Found = Mapping[str, set[str]]


class Run(NamedTuple):
    """The results with one SDK: outcomes by behavior, and facts about the wire by name."""

    outcomes: Found
    facts: Found


Runs = Callable[[str], Run]


@pytest.fixture(scope="module")
def runs(descriptions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run the tests with an SDK once, concurrently against the servers of all model families."""

    @cache
    def run(version: str) -> Run:
        folders = [tmp_path_factory.mktemp(f"{version}-{family}") for family in descriptions]
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(partial(_run, version), descriptions.values(), folders))
        assert not processes_with(python(version))
        return Run(*(_merged(found) for found in zip(*results, strict=True)))

    return run


def _run(version: str, description: Path, folder: Path) -> Run:
    output = run_client(python(version), description, folder)
    found = _read(folder / "results.xml")
    assert set().union(*found.outcomes.values()) <= MARKS.keys(), output[-20_000:]
    return found


def _read(results: Path) -> Run:
    outcomes, facts = defaultdict(set), defaultdict(set)
    for case in ET.parse(results).iter("testcase"):
        properties = {one.attrib["name"]: one.attrib["value"] for one in case.iter("property")}
        outcome = case.find("*[@message]")
        kind = "passed" if outcome is None else outcome.attrib["type"] if outcome.tag == "skipped" else outcome.tag
        outcomes[properties.pop("behavior")].add(kind)
        for name, value in properties.items():
            facts[name].add(value)
    return Run(outcomes, facts)


def _merged(found: Iterable[Found]) -> Found:
    merged = defaultdict(set)
    for name, values in chain.from_iterable(one.items() for one in found):
        merged[name] |= values
    return merged


@pytest.mark.timeout(2 * SECONDS)  # includes the servers' start
@pytest.mark.parametrize("version", VERSIONS)
def test_each_sdk(version: str, runs: Runs) -> None:
    assert {"passed"} in runs(version).outcomes.values()


@pytest.mark.timeout(SECONDS * (1 + len(VERSIONS)))  # runs all of them if selected alone
def test_the_table_matches_the_results(runs: Runs, tmp_path: Path) -> None:
    found = tmp_path / TABLE.name
    found.write_text(_table({version: runs(version) for version in VERSIONS}), encoding="utf-8")
    assert found.read_text("utf-8") == TABLE.read_text("utf-8"), f"cp {found} {TABLE}, if that is what it should be"


def _table(by_version: Mapping[str, Run]) -> str:
    found = list(by_version.values())
    rows = [["", *by_version]]
    rows += [[name, *(_only(run.facts[name]) for run in found)] for name in found[0].facts]
    rows += [[name, *(MARKS[_only(run.outcomes[name])] for run in found)] for name in found[0].outcomes]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


def _only(values: set[str]) -> str:
    """Return the value that all model families share."""
    (value,) = values
    return value
