"""Tests that need a GPU; `make test` does not collect them."""

import pytest
import torch


def pytest_configure() -> None:
    if not torch.cuda.is_available():
        pytest.exit("tests/gpu needs a CUDA device, and torch.cuda.is_available() is False", returncode=2)
