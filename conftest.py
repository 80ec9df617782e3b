"""Hypothesis profiles, markers and options, shared by the tests of all packages.

`HYPOTHESIS_PROFILE=nightly` tries more examples, different in every run; by default every run tries the same ones.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("agent_kit", "gym_kit", "report_kit", "train_kit", "tx_kit", "veritas_kit")

# PyTorch reads it when it is imported. Tests compare runs bit by bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MARKERS = {
    "skyrl-train/tests/ray": "ray",
    "skyrl-train/tests/sglang": "sglang",
    "skyrl-train/tests/vllm": "vllm",
    "skyrl-tx/tests/vllm_server": "vllm",
    "skyrl-tx/tests/sdk": "integrations",
    "skyrl-gym/tests/openenv_server": "integrations",
    "skyrl-gym/tests/verifiers_v0": "integrations",
    "veritas-rl/tests/recipes": "recipes",
}
"""The marker of all tests in a folder."""

BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", BUSY_MACHINE, derandomize=True)
settings.register_profile("nightly", BUSY_MACHINE, derandomize=False, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite golden files with what the code now prints")
    parser.addoption("--tokenizer", help="folder of a tokenizer for the tiny model, instead of one trained on Catch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the folders in `MARKERS`."""
    for item in items:
        folder = item.path.parent.relative_to(config.rootpath).as_posix()
        if folder in MARKERS:
            item.add_marker(MARKERS[folder])


@pytest.fixture(scope="module")
def frozen_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, which makes each `gc.collect` a second faster."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates in captured output, which worker processes of pytest-xdist cannot send."""
    report = yield
    report.sections = [(title, text.encode("utf-8", "replace").decode()) for title, text in report.sections]
    return report
