"""A run that is interrupted and resumed ends exactly like an uninterrupted one.

`TEST_KILLS=50` kills runs at 50 random moments, instead of two, with one rank and with two: while they start, resume,
train, save, upload, remove checkpoints and end.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from train_kit.datasets import write_answers
from train_kit.processes import TRAIN_FOLDER, python, wait_until
from train_kit.runs import AtStepEnd, Run, assert_equal_runs, run_of, small_run, supervised_run, train, train_with

from examples.catch.catch_dataset import CatchDataset, write_dataset
from skyrl_report.remote import RemoteFolder
from skyrl_train.checkpoint import RemoteCheckpoints
from skyrl_train.checkpoint.manifest import find_damage
from skyrl_train.checkpoint.store import POINTER

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
pytestmark = pytest.mark.usefixtures("catch")

N_KILLS = int(os.environ.get("TEST_KILLS", "2"))
SILENT: dict[str, Any] = {"cwd": TRAIN_FOLDER, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_dataset(CatchDataset(train_size=9, test_size=5), folder)
    return write_answers(folder)


MODULES = {"train": "examples.catch.main_catch", "sft": "skyrl_train.entrypoints.main_sft"}
"""The module that runs each command in a process."""

MakeOverrides = Callable[..., list[str]]


@pytest.fixture(scope="module")
def overrides_of(data: Path, tiny_model_path: Path) -> MakeOverrides:
    """Return the overrides of a run of 6 steps in a folder; checkpoints fall inside of epochs and on their ends."""

    def make(command: str, folder: Path, *overrides: str) -> list[str]:
        if command == "sft":
            return supervised_run(folder, *overrides, model=tiny_model_path, data=data)
        settings = [
            "trainer.epochs=3",
            "trainer.policy_mini_batch_size=2",
            "trainer.policy.optimizer_config.lr=1e-2",
            "trainer.policy.optimizer_config.scheduler=cosine",
            "trainer.ckpt_interval=2",
            "trainer.eval_interval=3",
            "trainer.hf_save_interval=100",
            "generator.batched=true",
            "generator.max_turns=5",
            "generator.n_samples_per_prompt=2",
            "generator.sampling_params.max_generate_length=2",
            *overrides,
        ]
        files = {"data": data / "train.parquet", "val_data": data / "validation.parquet"}
        return small_run(folder, *settings, model=tiny_model_path, **files)

    return make


@pytest.fixture(scope="module")
def uninterrupted(overrides_of: MakeOverrides, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    return cache(lambda command: train(*overrides_of(command, tmp_path_factory.mktemp(command)), command=command))


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_killed_run_ends_like_an_uninterrupted_one(
    command: str, overrides_of: MakeOverrides, uninterrupted: Callable[[str], Run], tmp_path: Path
) -> None:
    n_steps, delay = random.randrange(1, 6), random.uniform(0, 0.1)
    overrides = overrides_of(command, tmp_path)
    run = run_of(overrides)
    log = run.folder / "metrics.jsonl"
    with subprocess.Popen([python(), "-m", MODULES[command], *overrides], **SILENT) as process:
        wait_until(lambda: process.poll() is not None or (log.exists() and log.read_text().count("\n") >= n_steps))
        time.sleep(delay)
        process.kill()
    train(*overrides, command=command)
    moment = f"{delay:.3f} s after {n_steps} lines"
    assert run.reproducible_metrics == uninterrupted(command).reproducible_metrics, moment
    assert_equal_runs(run, uninterrupted(command))


def test_a_terminated_run_saves_its_step_and_ends_like_an_uninterrupted_one(
    overrides_of: MakeOverrides, uninterrupted: Callable[[str], Run], tmp_path: Path
) -> None:
    """`test_base.py` has the other signals."""

    def terminate(_: object, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    overrides = overrides_of("train", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_with(*overrides, first=[AtStepEnd(terminate)])
    run = run_of(overrides)
    assert "Stopping after the current step: interrupted" in run.log
    assert run.checkpoints.steps()[-1] == run.steps[-1] < 6
    train(*overrides)
    assert_equal_runs(run, uninterrupted("train"))


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "n_ranks"), [("train", 1), ("sft", 2)])
def test_runs_that_are_killed_again_and_again_end_like_an_uninterrupted_one(
    command: str,
    n_ranks: int,
    overrides_of: MakeOverrides,
    uninterrupted: Callable[[str], Run],
    tiny_model_path: Path,
    tmp_path: Path,
) -> None:
    """Checkpoints are saved and uploaded after each step. Every second time, the machine is lost as well."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    overrides = overrides_of(
        command, tmp_path, "trainer.ckpt_interval=1", f"trainer.remote_ckpt_url=file://{tmp_path}/remote"
    )
    program = [sys.executable, *(TORCHRUN if n_ranks > 1 else []), "-m", MODULES[command]]
    remote = RemoteCheckpoints(RemoteFolder(f"file://{tmp_path}/remote/skyrl/{tiny_model_path.name}/test_run"))
    run, n_killed = run_of(overrides), 0
    checkpoints = run.checkpoints
    whole_run_s = 15.0  # at first a guess
    while n_killed < N_KILLS:
        moment = f"kill {n_killed} of seed {seed}"
        started = time.monotonic()
        process = psutil.Popen([*program, *overrides], **SILENT)
        try:
            status = process.wait(generator.uniform(0.2, 1.0) * whole_run_s)
        except psutil.TimeoutExpired:
            kill(process, generator)
            n_killed += 1
        else:
            assert status == 0, moment
            whole_run_s = time.monotonic() - started
        if checkpoints.resumable_step() is not None:
            latest = checkpoints.latest()
            assert latest is not None, moment
            assert find_damage(latest) == [], moment
        incomplete = [path.name for path in checkpoints.path.glob(".global_step_*")]
        assert len(incomplete) <= 3, f"leftovers of earlier kills are removed: {incomplete}, {moment}"
        step = remote.latest_step()
        if n_killed % 2 and step is not None and run.folder.exists():  # a run that starts again logs step 0 again
            shutil.rmtree(run.folder)
        elif checkpoints.resumable_step() == 6:
            shutil.rmtree(run.folder)
            shutil.rmtree(tmp_path / "remote", ignore_errors=True)
    subprocess.run([*program, *overrides], check=True, **SILENT)
    if n_ranks > 1:
        whole = overrides_of(command, tmp_path / "whole")
        subprocess.run([*program, *whole], check=True, **SILENT)
    expected = run_of(whole) if n_ranks > 1 else uninterrupted(command)
    steps = {step["step"]: step for step in expected.reproducible_metrics}
    for row in run.reproducible_metrics:
        assert row == steps[row["step"]], f"seed {seed}"
    for name, tensor in run.weights(6).items():
        assert torch.equal(tensor, expected.weights(6)[name]), f"{name}, seed {seed}"
    left = {entry.name for entry in checkpoints.path.iterdir()}
    assert left == {"global_step_6", POINTER, ".lock"}, f"nothing is left behind, seed {seed}"
    assert all(remote.is_complete(step) for step in range(1, 7))


def kill(process: psutil.Popen, generator: random.Random) -> None:
    """Kill all processes of a run, like a lost machine, or kill one rank and wait until the others end."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()  # it starts no others meanwhile
        processes = [process, *process.children(recursive=True)]
        ranks = [child for child in processes if child != process and "RANK" in child.environ()]
        if ranks and generator.random() < 0.5:
            generator.choice(ranks).kill()
            process.resume()
        else:
            for each in processes:
                each.kill()
    process.wait(120)
