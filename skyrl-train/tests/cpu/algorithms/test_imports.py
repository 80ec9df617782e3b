"""`skyrl_train.algorithms` loads PyTorch at its first use, and no other heavy package."""

from __future__ import annotations

import subprocess
import sys

CODE = "import sys, skyrl_train.algorithms; print(*{name.partition('.')[0] for name in sys.modules})"


def test_importing_algorithms_loads_no_heavy_package() -> None:
    loaded = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ray", "vllm", "sglang", "transformers"} & set(loaded)
