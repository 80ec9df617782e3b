"""Shared fixtures, and an option for the tokenizer of the tiny model."""

import signal
from collections.abc import Iterator

import pytest
from train_kit.fixtures import *  # noqa: F403


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the tokenizer of the tiny model."""
    parser.addoption("--tokenizer", help="folder of a tokenizer for the tiny model, instead of one trained on Catch")


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Let SIGHUP reach the test, even if `nohup` has started pytest."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
