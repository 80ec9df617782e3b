"""`skyrl_train.algorithms` imports quickly and depends on torch only."""

from __future__ import annotations

import subprocess
import sys

CODE = "import sys, skyrl_train.algorithms; print(*{name.partition('.')[0] for name in sys.modules})"


def test_algorithms_load_neither_ray_nor_an_engine_nor_transformers() -> None:
    loaded = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" in loaded
    assert not {"ray", "vllm", "sglang", "transformers"} & set(loaded)
