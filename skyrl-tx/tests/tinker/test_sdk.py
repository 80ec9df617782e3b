"""The tests of `sdk/client` with the SDK that is installed here and the backend on PyTorch, which compiles nothing.

`make test-tinker` runs them with every SDK, on JAX, and with more models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sdk.environments import SECONDS, run_client, tell
from sdk.models import save
from tx_process import process


@pytest.mark.timeout(2 * SECONDS)  # with the server
def test_the_sdk(tmp_path: Path) -> None:
    model = tmp_path / "tiny" / "qwen3"
    save("qwen3", model)
    flags = ("--base-model", str(model), "--max-models=1000", "--backend=torch", "--compress-passes")
    with process(tmp_path / "state", *flags) as server:
        server.wait_for_engine()
        told = tell(tmp_path / "told.json", model, server.url, is_compressing=True)
        said = run_client(sys.executable, told, tmp_path)
    assert " passed" in said
