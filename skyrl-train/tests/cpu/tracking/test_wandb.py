from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_tracking_does_not_import_wandb() -> None:
    code = "import sys, skyrl_train.tracking; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


_OFFLINE_RUN = """
import sys
from pathlib import Path
from skyrl_train.tracking import Tracking
with Tracking("catch", "shaped", "wandb", {"trainer": {"seed": 1}}, Path(sys.argv[1])) as tracking:
    tracking.log({"reward/avg_raw_reward": 0.5}, step=1)
"""


def test_offline_mode_works_without_a_key(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _OFFLINE_RUN, str(tmp_path / "run")], env=environ, check=True, timeout=120)
    (log,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"reward/avg_raw_reward" in log.read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").exists()
