"""A disk that fails for a while in the middle of a run costs checkpoints of that time, and nothing else.

Each run mounts a small disk in a mount namespace of its own: as root, or as a user where the kernel allows user
namespaces. test_durability covers a full and a read-only disk without a mount.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

IS_ROOT = os.geteuid() == 0
UNSHARE = ["unshare", "--mount"] if IS_ROOT else ["unshare", "--mount", "--user", "--map-root-user"]

nightly = pytest.mark.nightly


@cache
def find_problem() -> str | None:
    """Return the reason why no disk can be mounted in a namespace, or None if it can."""
    try:
        subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=True, capture_output=True, text=True)
    except OSError as error:
        return str(error)
    except subprocess.CalledProcessError as error:
        return str(error.stderr)
    return None


def run(fault: str, catch_run: list[str], tmp_path: Path) -> dict[str, Any]:
    """Run six steps with a fault from step 2 to 5, and return what happened."""
    if problem := find_problem():
        pytest.skip(f"no disk can be mounted here: {problem}")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = Path(__file__).with_name("faulty_disk_run.py")
    overrides = ["trainer.epochs=3", "trainer.eval_interval=-1", "trainer.ckpt_timeout_seconds=1"]
    finished = subprocess.run(
        [*UNSHARE, sys.executable, str(script), fault, str(disk), *catch_run, *overrides],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=250,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert result["steps"] == [0, 1, 2, 3, 4, 5, 6], "training continues"
    assert (result["latest"], result["damage"], result["left"]) == ("global_step_6", [], [])
    assert {1, 6} <= set(result["saved"])
    return result


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("full", "No space left on device"),
        pytest.param("read_only", "Read-only file system", marks=nightly),
        pytest.param("flaky", "Input/output error", marks=nightly),
    ],
)
def test_a_disk_that_refuses_costs_only_the_checkpoints_of_that_time(
    catch_run: list[str], tmp_path: Path, fault: str, message: str
) -> None:
    result = run(fault, catch_run, tmp_path)
    failures = [alert for alert in result["alerts"] if "cannot save the checkpoint of step" in alert]
    assert failures
    assert all(message in alert for alert in failures)
    assert len(result["saved"]) + len(failures) == 6, "each step is saved, or reported"


def test_a_folder_that_is_removed_during_a_save_is_created_again(catch_run: list[str], tmp_path: Path) -> None:
    run("vanished", catch_run, tmp_path)


@pytest.mark.parametrize(
    "fault", ["stalled", *(pytest.param(fault, marks=nightly) for fault in ("stalled_folder", "frozen"))]
)
def test_training_waits_for_a_stalled_disk_only_as_long_as_configured(
    catch_run: list[str], tmp_path: Path, fault: str
) -> None:
    """The disk answers again only after step 5, which the run would never reach if it waited for the disk."""
    if fault == "frozen" and not (IS_ROOT and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")):
        pytest.skip("only root can freeze a disk")
    result = run(fault, catch_run, tmp_path)
    slow = [alert for alert in result["alerts"] if "longer than trainer.ckpt_timeout_seconds=1" in alert]
    assert len(slow) == 1, "one alert for a stall"
    assert not {4, 5} & set(result["saved"])
