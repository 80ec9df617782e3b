"""Full disks: a run ends with one message or continues without the file, and leaves no incomplete folders."""

import asyncio
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from train_kit.runs import AtStepEnd, expect_error, run_of, train, train_with

from skyrl_train import callbacks
from skyrl_train.callbacks import Callback
from skyrl_train.errors import CheckpointError, StorageError

OLD_LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)


def limit_files(n_bytes: int | None) -> None:
    """Let writes fail that make a file of this process larger; None removes the limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, OLD_LIMITS if n_bytes is None else (n_bytes, OLD_LIMITS[1]))


@pytest.fixture(autouse=True)
def restored_limit() -> Iterator[None]:
    yield
    limit_files(None)


@pytest.fixture
def saving_run(catch_run: list[str]) -> list[str]:
    """Overrides of a run of two steps with a checkpoint after each."""
    return [*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1"]


class FillAfterCheckpoint(Callback):
    """Limits files once the checkpoint of step 2 is saved."""

    async def on_checkpoint(self, run: callbacks.Run, path: Path) -> None:
        if path.name == "global_step_2":
            limit_files(400_000)


@pytest.mark.parametrize(
    ("fill", "failure", "resumed_step"),
    [
        (
            AtStepEnd(lambda run, step: limit_files(400_000 if step == 2 else None)),
            "cannot save the checkpoint at step 2 in {0}/ckpts: the policy could not be written: ",
            1,
        ),
        (
            FillAfterCheckpoint(),
            "cannot export step 2 to {0}/export/global_step_2: the policy could not be written: ",
            2,
        ),
    ],
    ids=["checkpoint", "export"],
)
def test_a_file_that_cannot_be_written_ends_the_run_and_leaves_room(
    saving_run: list[str], fill: Callback, failure: str, resumed_step: int
) -> None:
    overrides = [*saving_run, "trainer.hf_save_interval=2"]
    run = run_of(overrides)
    with pytest.raises(CheckpointError) as error:
        train_with(*overrides, first=[fill])
    message = str(error.value)
    assert message.startswith(failure.format(run.folder))
    assert "File too large" in message
    assert message.endswith(f"rerun the command: it resumes from step {resumed_step}")
    assert list(run.folder.glob("*/.global_step_*")) == [], "incomplete folders take up room"
    assert not run.export(2).exists()
    limit_files(None)
    assert train(*overrides).weights(2)


def test_a_disk_that_is_full_for_a_while_costs_no_metrics_and_the_next_step_is_saved(
    saving_run: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """During steps 1 and 2 of 4, files cannot grow; the run has a checkpoint interval of 2."""
    overrides = [*saving_run, "trainer.ckpt_interval=2", "trainer.epochs=2"]
    run, alerts = run_of(overrides), list[str]()

    class FillDisk(Callback):
        async def on_step_end(self, current: callbacks.Run, report: callbacks.StepReport) -> None:
            while report.global_step == 3 and current.is_saving:  # step 2, which fails
                await asyncio.sleep(0.01)
            is_full = report.global_step in (1, 2)
            limit_files((run.folder / "metrics.jsonl").stat().st_size + 10 if is_full else None)

        async def on_alert(self, current: callbacks.Run, text: str) -> None:
            alerts.append(text)

    train_with(*overrides, first=[FillDisk()])
    assert run.steps == [0, 1, 2, 3, 4]
    assert run.checkpoints.steps() == [3, 4]
    assert list(run.folder.glob("ckpts/.global_step_*")) == []
    assert any("cannot save the checkpoint at step 2" in text for text in alerts)
    assert "Storage: Logging failed at step 2: [Errno 27] File too large. Training continues" in caplog.text
    assert run.metrics[-1]["storage/alerts"] == len(alerts)


def test_an_update_waits_for_a_checkpoint_whose_copy_it_has_no_memory_for(
    saving_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    class Save(Callback):
        async def on_step_end(self, current: callbacks.Run, report: callbacks.StepReport) -> None:
            await current.begin_checkpoint()
            assert current.is_saving
            monkeypatch.setattr("skyrl_train.run.free_host_bytes", lambda: 0)  # as in a full control group
            await current.make_room()
            saved.append(not current.is_saving)

    train_with(*saving_run, "trainer.ckpt_interval=-1", first=[Save()])
    assert saved
    assert all(saved)


REFUSALS = [
    *(errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EBUSY),
    *(errno.EPIPE, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETDOWN, None),
]
"""Numbers of errors of disks, network file systems and clients of services, whose errors may have none."""


def test_a_callback_that_cannot_write_costs_neither_training_nor_the_last_checkpoint(saving_run: list[str]) -> None:
    """Every step has another error, and so has the last, after which a checkpoint is still written."""
    overrides = [*saving_run, f"trainer.max_training_steps={len(REFUSALS)}", "trainer.epochs=99"]
    alerts: list[str] = []

    class Refused(Callback):
        async def on_step_end(self, run: callbacks.Run, report: callbacks.StepReport) -> None:
            if report.global_step > 0:
                number = REFUSALS[report.global_step - 1]
                raise OSError("the service is down") if number is None else OSError(number, os.strerror(number))

        async def on_alert(self, run: callbacks.Run, text: str) -> None:
            alerts.append(text)

    with pytest.raises(StorageError, match=r"Refused failed at step 10: the service is down\. .* resumes from step 10"):
        train_with(*overrides, first=[Refused()])
    run = run_of(overrides)
    assert run.steps == list(range(len(REFUSALS) + 1))
    assert run.checkpoints.steps()[-1] == len(REFUSALS)
    assert len(alerts) == len(REFUSALS) - 1


def test_a_run_folder_that_becomes_protected_costs_no_step(saving_run: list[str]) -> None:
    """`chattr +i` stops even root from creating files. Open files stay writable."""
    overrides = [*saving_run, "trainer.epochs=2", "trainer.dump_trajectories=true"]
    run = run_of(overrides)
    folders = [run.folder, run.folder / "ckpts", run.folder / "trajectories"]

    def protect(_: callbacks.Run, step: int) -> None:
        if step == 1:
            folders[-1].mkdir(exist_ok=True)
            if subprocess.run(["chattr", "+i", *folders], check=False, stderr=subprocess.DEVNULL).returncode:
                pytest.skip("this file system has no immutable folders")

    try:
        with pytest.raises(StorageError, match=r"Operation not permitted.*Free disk space or make the folder writable"):
            train_with(*overrides, first=[AtStepEnd(protect)])
    finally:
        subprocess.run(["chattr", "-i", *folders], check=False, stderr=subprocess.DEVNULL)
    assert run.steps == [0, 1, 2, 3, 4]
    train(*overrides)
    assert run.checkpoints.steps()[-1] == 4


def test_a_log_on_a_full_disk_is_warned_of_once_and_does_not_end_the_run(
    saving_run: list[str], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(saving_run)
    run.folder.mkdir(parents=True)
    (run.folder / "train.log").symlink_to("/dev/full")
    train(*saving_run)
    assert run.checkpoints.steps() == [1, 2]
    assert caplog.text.count("train.log lacks the last messages: [Errno 28] No space left on device") == 1
    assert "Logging error" not in capsys.readouterr().err


def test_a_full_disk_ends_a_run_with_one_message(saving_run: list[str]) -> None:
    folder = run_of(saving_run).folder
    folder.mkdir(parents=True)
    for name in ("config.yaml", "train.log"):
        (folder / name).symlink_to("/dev/full")
    assert (
        f"error: a file of the run in {folder} could not be written: [Errno 28] No space left on device. Free disk "
        "space or make the folder writable, then rerun the command: it starts again, because there is no checkpoint"
    ) in expect_error(*saving_run)
