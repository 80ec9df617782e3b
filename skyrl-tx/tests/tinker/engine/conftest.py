from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tx_kit.engines import Desk, new_backend


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Path) -> Iterator[Desk]:
    """A desk with an engine on JAX."""
    made = Desk(tmp_path, new_backend(tiny_model))
    yield made
    made.close()
