"""Run the tests of `sdk/client` with the installed SDK, on the PyTorch backend, which needs no compilation.

`make test-tinker` runs them with every SDK, on JAX, and with more models.
"""

import sys
from pathlib import Path

import pytest
from tx_kit.engines import serving_with_engine
from tx_kit.sdk import SECONDS, run_client, save_model, write_description

from tx.tinker.backends.factory import new_backend


@pytest.mark.timeout(2 * SECONDS)
def test_the_sdk(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path / "tiny" / "qwen3")
    settings = {"base_model": str(model), "max_models": 1000, "compress_passes": True}
    with serving_with_engine(tmp_path / "state", new_backend("torch", model, {}, str(model)), **settings) as server:
        description = write_description(tmp_path / "server.json", model, server.url, is_compressing=True)
        output = run_client(sys.executable, description, tmp_path)
    assert " passed" in output
