"""A run that is interrupted and resumed ends exactly like an uninterrupted one.

`TEST_KILLS=50` kills runs at 50 random moments, instead of two, with one rank and with two: while they start, resume,
train, save, upload, remove checkpoints and end.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from sft_runs import metrics, overrides, weights, write_rows

from examples.catch.catch_dataset import CatchDataset, write_dataset
from skyrl_train.checkpoint import CheckpointStore, RemoteCheckpoints, RemoteFolder
from skyrl_train.checkpoint.manifest import find_damage
from skyrl_train.checkpoint.store import POINTER

TRAIN_FOLDER = Path(__file__).parents[3]
N_KILLS = int(os.environ.get("TEST_KILLS", "2"))
N_STEPS = 6  # three epochs of two batches: checkpoints fall inside epochs and on their boundaries


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catch")
    write_dataset(CatchDataset(train_size=9, test_size=5), folder)
    return folder


def command(data_dir: Path, model: Path, output_dir: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "examples.catch.main_catch"),
        f"data.train_data=['{data_dir}/train.parquet']",
        f"data.val_data=['{data_dir}/validation.parquet']",
        f"trainer.policy.model.path='{model}'",
        f"trainer.output_dir='{output_dir}'",
        "trainer.run_name=test_run",
        "trainer.epochs=3",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=2",
        "trainer.policy.optimizer_config.lr=1e-2",
        "trainer.policy.optimizer_config.scheduler=cosine",
        "trainer.ckpt_interval=2",
        "trainer.eval_interval=3",
        "trainer.hf_save_interval=100",
        "trainer.logger=jsonl",
        "generator.batched=true",
        "generator.max_turns=5",
        "generator.n_samples_per_prompt=3",
        "generator.sampling_params.max_generate_length=2",
    ]


def run(arguments: list[str]) -> None:
    finished = subprocess.run(arguments, cwd=TRAIN_FOLDER, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


def run_until(arguments: list[str], metrics_file: Path, n_lines: int, delay: float, number: signal.Signals) -> int:
    """Start the run, send a signal `delay` seconds after it logged `n_lines` steps, and return its exit status."""
    process = subprocess.Popen(arguments, cwd=TRAIN_FOLDER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics_file.exists() and metrics_file.read_text().count("\n") >= n_lines:
            time.sleep(delay)
            break
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(timeout=120)


@pytest.fixture(scope="module")
def uninterrupted(data_dir: Path, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(command(data_dir, tiny_model_path, folder))
    assert [row["step"] for row in metrics(folder)] == list(range(N_STEPS + 1))
    return folder


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 130)])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    data_dir: Path, tiny_model_path: Path, uninterrupted: Path, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    # SIGTERM must arrive before the last step to be handled; SIGKILL may arrive at any moment.
    n_lines, delay = (random.randrange(1, N_STEPS), random.uniform(0, 0.2))
    if number == signal.SIGTERM:
        n_lines, delay = min(n_lines, 2), 0.0
    moment = f"{number.name} {delay:.3f} s after {n_lines} lines"
    arguments = command(data_dir, tiny_model_path, tmp_path)
    assert run_until(arguments, tmp_path / "skyrl/test_run/metrics.jsonl", n_lines, delay, number) == status, moment
    if number == signal.SIGTERM:
        logged = metrics(tmp_path)[-1]["step"]
        assert (tmp_path / f"skyrl/test_run/ckpts/global_step_{logged}").is_dir(), moment
        assert "Stopping after the current step: interrupted" in (tmp_path / "skyrl/test_run/train.log").read_text()
    run(arguments)

    assert metrics(tmp_path) == metrics(uninterrupted), moment
    expected = weights(uninterrupted, N_STEPS)
    for name, tensor in weights(tmp_path, N_STEPS).items():
        assert torch.equal(tensor, expected[name]), f"{name}, {moment}"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.nightly)])
def long_run(
    request: pytest.FixtureRequest, data_dir: Path, tiny_model_path: Path, tmp_path: Path
) -> Callable[[Path], list[str]]:
    """Return the command for an output folder: GRPO in one process, or supervised fine-tuning on two ranks."""
    if request.param == 1:
        return partial(command, data_dir, tiny_model_path)
    write_rows(tmp_path)
    sharded = [*TORCHRUN, "-m", "skyrl_train.entrypoints.main_sft"]
    return lambda folder: [*sharded, *overrides(tmp_path, tiny_model_path, folder)]


def kill(process: psutil.Popen, generator: random.Random) -> None:
    """Kill all processes of a run, as a lost machine does; or one of its ranks, and wait for the others to end."""
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


@pytest.mark.nightly
def test_runs_that_are_killed_again_and_again_end_like_an_uninterrupted_one(
    long_run: Callable[[Path], list[str]], tiny_model_path: Path, tmp_path: Path
) -> None:
    """Checkpoints are saved and uploaded after each step. Every second time, the machine is lost as well."""
    run(long_run(tmp_path / "uninterrupted"))
    reference = {row["step"]: row for row in metrics(tmp_path / "uninterrupted")}
    n_steps = max(reference)
    generator = random.Random(seed := random.randrange(10**6))
    remote = RemoteCheckpoints(RemoteFolder(f"file://{tmp_path}/remote/skyrl/{tiny_model_path.name}/test_run"))
    output_dir = tmp_path / "killed"
    folder, n_killed, n_rounds = output_dir / "skyrl/test_run", 0, 0
    arguments = [
        *long_run(output_dir),
        "trainer.ckpt_interval=1",
        f"trainer.remote_ckpt_url=file://{tmp_path}/remote",
    ]
    whole_run_s = 15.0  # at first a guess
    while n_killed < N_KILLS:
        started = time.monotonic()
        process = psutil.Popen(arguments, cwd=TRAIN_FOLDER, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            status = process.wait(generator.uniform(0.2, 1.0) * whole_run_s)
        except psutil.TimeoutExpired:
            kill(process, generator)
            n_killed += 1
        else:
            assert status == 0, f"round {n_rounds} of seed {seed}"
            whole_run_s = time.monotonic() - started
        n_rounds += 1
        moment = f"kill {n_killed} of seed {seed}"
        store = CheckpointStore(folder / "ckpts")
        if store.resumable_step() is not None:
            latest = store.latest()
            assert latest is not None, moment
            assert find_damage(latest) == [], moment
        incomplete = [path.name for path in folder.glob("ckpts/.global_step_*")]
        assert len(incomplete) <= 3, f"leftovers of earlier kills are removed: {incomplete}, {moment}"
        step = remote.latest_step()
        if n_killed % 2 and step is not None and folder.exists():  # step 0 of a run that starts again is logged again
            shutil.rmtree(folder)
        elif store.resumable_step() == n_steps:
            shutil.rmtree(folder)
            shutil.rmtree(tmp_path / "remote", ignore_errors=True)
    run(arguments)
    expected = weights(tmp_path / "uninterrupted", n_steps)
    for name, tensor in weights(output_dir, n_steps).items():
        assert torch.equal(tensor, expected[name]), f"{name}, seed {seed}"
    for row in metrics(output_dir):
        assert row == reference[row["step"]], f"seed {seed}"
    left = {entry.name for entry in (folder / "ckpts").iterdir()}
    assert left == {f"global_step_{n_steps}", POINTER, ".lock"}, f"nothing is left behind, seed {seed}"
    assert all(remote.is_complete(step) for step in range(1, n_steps + 1))
