"""Shared fixtures."""

import signal
from collections.abc import Iterator

import pytest
from train_kit.fixtures import *  # noqa: F403


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """Let SIGHUP reach the test, even if `nohup` has started pytest."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
