"""Runs whose checkpoints and evaluations are uploaded to S3, through a network with faults."""

import os
import shutil
import time
from pathlib import Path

import pytest
from train_kit.checkpoints import save, write_named
from train_kit.networks import Faults
from train_kit.runs import expect_error, stop_after, train, train_with

from skyrl_report.remote import RemoteFolder
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.checkpoint import CheckpointStore, RemoteCheckpoints


@pytest.fixture
def command(catch_run: list[str], bucket: str) -> list[str]:
    """A run of two steps with a checkpoint after each."""
    return [
        *catch_run,
        "trainer.ckpt_interval=1",
        "generator.batched=true",
        f"trainer.remote_ckpt_url={bucket}/ckpts",
        f"trainer.remote_trajectory_url={bucket}/trajectories",
    ]


def run_url(bucket: str, model: Path) -> RemoteCheckpoints:
    return RemoteCheckpoints(RemoteFolder(f"{bucket}/ckpts/skyrl/{model.name}/test_run"))


def test_checkpoints_and_evaluations_are_uploaded_and_one_checkpoint_stays(
    command: list[str], bucket: str, tiny_model_path: Path
) -> None:
    run, remote = train(*command), run_url(bucket, tiny_model_path)
    assert remote.steps() == [1, 2]
    assert all(remote.is_complete(step) for step in (1, 2))
    assert run.checkpoints.steps() == [2]
    assert remote.is_complete(2, like=run.folder / "ckpts/global_step_2")
    evals = RemoteFolder(f"{bucket}/trajectories/evals/test_run")
    assert evals.names() == ["global_step_0", "global_step_2"]
    assert (evals / "global_step_2").names() == ["aggregated_results.jsonl", "synthetic_catch.jsonl"]


def test_a_machine_that_never_saw_the_run_continues_it(
    command: list[str], bucket: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    """The first machine stops after step 1 and is lost; the whole run on one machine gives the same metrics."""

    run = stop_after(1, *command)
    first = run.reproducible_metrics
    shutil.rmtree(tmp_path / "skyrl")
    second = train(*command).reproducible_metrics
    assert "Downloading the checkpoint at step 1" in run.log
    assert [row["step"] for row in second] == [2]
    assert run_url(bucket, tiny_model_path).latest_step() == 2
    shutil.rmtree(tmp_path / "skyrl")
    train(*command, "trainer.resume_mode=none", "trainer.remote_ckpt_url=null", "trainer.remote_trajectory_url=null")
    assert first + second == run.reproducible_metrics


def test_a_changed_byte_in_s3_is_named_and_the_offered_checkpoint_resumes(
    command: list[str], bucket: str, tiny_model_path: Path, tmp_path: Path
) -> None:
    train(*command)
    folder = run_url(bucket, tiny_model_path).folder / "global_step_2"
    content = bytearray(folder.read("policy/__0_0.distcp") or b"")
    content[len(content) // 2] ^= 1
    folder.write("policy/__0_0.distcp", bytes(content))
    shutil.rmtree(tmp_path / "skyrl")
    message = expect_error(*command)
    assert f"the content of {folder.url}/policy/__0_0.distcp has changed since it was saved" in message
    settings = [word for word in message.split() if word.startswith("trainer.resume_")]
    assert settings[1].endswith("/global_step_1")
    train(*command, *settings)
    assert run_url(bucket, tiny_model_path).latest_step() == 2
    shutil.rmtree(tmp_path / "skyrl")
    train(*command)


def test_without_credentials_nothing_is_uploaded_and_the_log_says_so(
    command: list[str], bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    run = train(*command)
    assert "checkpoints stay on this machine: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set" in caplog.text
    assert run.checkpoints.steps() == [1, 2]


def test_storage_that_is_down_does_not_stop_training_and_the_rerun_uploads(
    command: list[str], bucket: str, faults: Faults, tiny_model_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alerts = []

    class Break(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            faults.is_down = True

        async def on_alert(self, run: Run, text: str) -> None:
            alerts.append(text)

    started = time.monotonic()
    run = train_with(*command, "trainer.remote_exit_timeout_seconds=3", first=[Break()])
    assert time.monotonic() - started < 60, "the run waits for uploads only as long as it says"
    assert "uploads are not complete; the files stay on this machine" in alerts[-1]
    assert f"Storage: {alerts[-1]}" in caplog.text
    assert run.checkpoints.steps() == [1, 2], "only uploaded ones are removed"
    faults.is_down = False
    train(*command)
    assert run_url(bucket, tiny_model_path).steps() == [1, 2]
    assert run_url(bucket, tiny_model_path).latest_step() == 2
    assert run.checkpoints.steps() == [2]


def test_a_stall_longer_than_a_step_and_cut_connections_delay_only_uploads(
    command: list[str], bucket: str, faults: Faults, tiny_model_path: Path
) -> None:
    """The network stalls for 30 s after step 1, and then cuts 5% of the connections."""

    class Break(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            if report.global_step == 1:
                faults.error_rate, faults.stalled_until = 0.05, time.monotonic() + 30
            elif report.global_step == 2:
                assert time.monotonic() < faults.stalled_until, "training waits for the network"

    run = train_with(*command, first=[Break()])
    remote = run_url(bucket, tiny_model_path)
    assert all(remote.is_complete(step) for step in (1, 2))
    assert run.checkpoints.steps() == [2]


@pytest.mark.parametrize("size", [10_000, 12_000_000])  # the second one is sent in parts
def test_cut_connections_are_retried(bucket: str, faults: Faults, tmp_path: Path, size: int) -> None:
    faults.error_rate = 0.2

    def write(folder: Path) -> None:
        write_named("ten")(folder)
        (folder / "weights").write_bytes(os.urandom(size))

    path = save(CheckpointStore(tmp_path / "local"), 10, write)
    remote = RemoteCheckpoints(RemoteFolder(f"{bucket}/run"))
    assert remote.upload(path) > size
    (tmp_path / "copy").mkdir()
    remote.download(10, tmp_path / "copy")
    assert (tmp_path / "copy/weights").read_bytes() == (path / "weights").read_bytes()
