"""Run the tests of `sdk/client` with the installed SDK, on the PyTorch backend, which needs no compilation.

`make test-tinker` runs them with every SDK, on JAX, and with more models.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sdk.environments import SECONDS, run_client, write_description
from sdk.models import save
from tx_kit.processes import process


@pytest.mark.timeout(2 * SECONDS)  # includes the server's start
def test_the_sdk(tmp_path: Path) -> None:
    model = tmp_path / "tiny" / "qwen3"
    save("qwen3", model)
    flags = ("--base-model", str(model), "--max-models=1000", "--backend=torch", "--compress-passes")
    with process(tmp_path / "state", *flags) as server:
        server.wait_for_engine()
        description = write_description(tmp_path / "server.json", model, server.url, is_compressing=True)
        output = run_client(sys.executable, description, tmp_path)
    assert " passed" in output
