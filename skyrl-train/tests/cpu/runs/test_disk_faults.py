"""A disk that fails for a while in the middle of a run costs checkpoints of that time, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from train_kit.disks import FAULTS, MountedFault, Outcome, run_with_fault
from train_kit.processes import TRAIN_FOLDER

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


def run_on_mounted_disk(name: str, disk: Path, overrides: list[str]) -> Outcome:
    """Run in a mount namespace, as root or as a user where the kernel allows user namespaces."""
    if problem := find_problem():
        pytest.skip(f"no disk can be mounted here: {problem}")
    finished = subprocess.run(
        [*UNSHARE, sys.executable, "-m", "train_kit.disks", name, str(disk), *overrides],
        capture_output=True,
        text=True,
        cwd=TRAIN_FOLDER,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=250,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return Outcome(**json.loads(finished.stdout.splitlines()[-1]))


def run_six_steps(name: str, catch_run: list[str], tmp_path: Path) -> Outcome:
    """Train six steps with a fault from step 2 to 5, and return what happened."""
    disk = tmp_path / "disk"
    disk.mkdir()
    overrides = [*catch_run, "trainer.epochs=3", "trainer.eval_interval=-1", "trainer.ckpt_timeout_seconds=1"]
    if issubclass(FAULTS[name], MountedFault):
        outcome = run_on_mounted_disk(name, disk, overrides)
    else:
        outcome = run_with_fault(FAULTS[name](disk), overrides)
    assert outcome.steps == [0, 1, 2, 3, 4, 5, 6], "training continues"
    assert (outcome.latest, outcome.damage, outcome.partial) == ("global_step_6", [], [])
    assert {1, 6} <= set(outcome.saved)
    return outcome


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("flaky", "Input/output error"),
        pytest.param("full", "No space left on device", marks=nightly),  # test_full_disk has one without a mount
        pytest.param("read_only", "Read-only file system", marks=nightly),
    ],
)
def test_a_disk_that_refuses_costs_only_the_checkpoints_of_that_time(
    catch_run: list[str], tmp_path: Path, fault: str, message: str
) -> None:
    outcome = run_six_steps(fault, catch_run, tmp_path)
    failures = [alert for alert in outcome.alerts if "cannot save the checkpoint of step" in alert]
    assert failures
    assert all(message in alert for alert in failures)
    assert len(outcome.saved) + len(failures) == 6, "each step is saved, or reported"


def test_a_folder_that_is_removed_during_a_save_is_created_again(catch_run: list[str], tmp_path: Path) -> None:
    run_six_steps("vanished", catch_run, tmp_path)


@pytest.mark.parametrize(
    "fault", ["stalled", *(pytest.param(fault, marks=nightly) for fault in ("stalled_folder", "frozen"))]
)
def test_training_waits_for_a_stalled_disk_only_as_long_as_configured(
    catch_run: list[str], tmp_path: Path, fault: str
) -> None:
    """The disk answers again only after step 5, which the run would never reach if it waited for the disk."""
    if fault == "frozen" and not (IS_ROOT and Path("/dev/loop-control").exists() and shutil.which("mkfs.ext4")):
        pytest.skip("only root can freeze a disk")
    outcome = run_six_steps(fault, catch_run, tmp_path)
    slow = [alert for alert in outcome.alerts if "longer than trainer.ckpt_timeout_seconds=1" in alert]
    assert len(slow) == 1, "one alert for a stall"
    assert not {4, 5} & set(outcome.saved)
