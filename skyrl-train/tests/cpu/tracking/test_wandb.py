from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.tracking import require_wandb_login


@pytest.mark.parametrize("environ", [{"WANDB_API_KEY": "k"}, {"WANDB_MODE": "offline"}, {"WANDB_MODE": "disabled"}])
def test_a_key_or_a_mode_without_login_is_enough(environ: dict[str, str], tmp_path: Path) -> None:
    require_wandb_login({"HOME": str(tmp_path), **environ})


def test_a_missing_key_is_named_with_its_fixes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*WANDB_MODE=offline.*trainer\.logger=tensorboard"):
        require_wandb_login({"HOME": str(tmp_path), "WANDB_MODE": "online"})


def test_a_wandb_login_is_found_in_the_netrc_file(tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key\n")
    require_wandb_login({"HOME": str(tmp_path)})
    require_wandb_login({"NETRC": str(tmp_path / ".netrc")})
    with pytest.raises(ConfigError):
        require_wandb_login({"HOME": str(tmp_path), "WANDB_BASE_URL": "https://wandb.example.org"})


def test_the_check_imports_no_wandb() -> None:
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
