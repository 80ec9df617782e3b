"""Durability of runs: divergence, damaged checkpoints, full disks, an interrupted export, a second process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from train_kit.checkpoints import assert_a_changed_byte_is_named, flip_a_bit

from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.checkpoint import CheckpointStore, durable, folder_lock
from skyrl_train.checkpoint.manifest import find_damage, write_manifest
from skyrl_train.entrypoints.main_base import BasePPOExp, main, parse_cli, run_command
from skyrl_train.errors import ConfigError
from skyrl_train.learner import Learner
from skyrl_train.trainer import Step, Trainer
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.worker import Worker

TRAIN_FOLDER = Path(__file__).parents[2]


@pytest.fixture
def train(catch_run: list[str], tmp_path: Path) -> Callable[..., Path]:
    """Run two steps of Catch with a checkpoint after each, and return the run folder."""

    def run(*overrides: str) -> Path:
        main([*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1", *overrides])
        return tmp_path / "skyrl/test_run"

    return run


def pointed_step(folder: Path) -> int:
    return int((folder / "ckpts/latest_ckpt_global_step.txt").read_text())


@pytest.mark.parametrize(
    ("stage", "step", "overrides"),
    [
        ("update", 2, ["trainer.hf_save_interval=1"]),  # the last step
        ("update", 2, ["trainer.ckpt_interval=-1", "trainer.hf_save_interval=1"]),
        ("update", 1, ["trainer.max_ckpts_to_keep=1"]),
        ("sync_weights", 1, []),  # found before the checkpoint
        ("sync_weights", 1, ["trainer.ckpt_interval=-1"]),  # found when the rollouts of the next step fail
    ],
)
def test_a_diverged_run_ends_with_its_own_status_and_keeps_what_is_finite(
    catch_run: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    step: int,
    overrides: list[str],
) -> None:
    class Diverging(Trainer):
        async def update(self, current: Step, batch: TrainingBatch) -> None:
            self.harm("update", current)
            await super().update(current, batch)

        async def sync_weights(self, current: Step) -> None:
            await super().sync_weights(current)
            self.harm("sync_weights", current)

        def harm(self, name: str, current: Step) -> None:
            if (name, current.number) == (stage, step):
                (rank,) = self.learner.policy._ranks
                with torch.no_grad():
                    for parameter in rank.worker.module.parameters():  # type: ignore[attr-defined]
                        parameter.fill_(torch.nan)

    class Experiment(BasePPOExp):
        trainer_class = Diverging

    command = [*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1", *overrides]
    with pytest.raises(SystemExit) as stop:
        run_command(Experiment(parse_cli(command)).run)
    assert stop.value.code == 3
    error = capsys.readouterr().err
    is_saved = step == 2 and "trainer.ckpt_interval=-1" not in overrides
    kept = "the checkpoint of step 1 is kept" if is_saved else "there is no earlier checkpoint"
    assert error.count("diverged with") == 1
    assert f"error: in step {step}, the policy has diverged with trainer.policy.optimizer_config.lr=1e-06: " in error
    assert f"its weights are NaN or infinite; {kept}. The same command would diverge again: start a new run" in error
    assert "Traceback" not in error
    folder = tmp_path / "skyrl/test_run"
    assert sorted(path.name for path in folder.glob("ckpts/.global_step_*")) == []
    assert sorted(path.name for path in folder.glob("ckpts/global_step_*")) == (["global_step_1"] if is_saved else [])
    is_exported = "trainer.hf_save_interval=1" in overrides
    assert [path.name for path in folder.glob("export/global_step_*")] == (["global_step_1"] if is_exported else [])
    if is_saved:
        main(command)
        assert pointed_step(folder) == 2, "without the fault, the run resumes from the finite checkpoint"


def test_a_learning_rate_of_1000_ends_the_run_in_its_first_step(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        train("trainer.policy.optimizer_config.lr=1e3", "trainer.policy.optimizer_config.weight_decay=0")
    assert stop.value.code == 3
    message = "in step 1, the policy has diverged with trainer.policy.optimizer_config.lr=1000: the gradient of"
    assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "skyrl/test_run/ckpts").iterdir()] == [".lock"]


def test_a_damaged_checkpoint_is_refused_and_the_offered_one_resumes(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train() / "ckpts"
    damaged = folder / "global_step_2/policy/__0_0.distcp"
    flip_a_bit(damaged)
    with pytest.raises(SystemExit):
        train()
    message = capsys.readouterr().err
    assert f"the content of {damaged} has changed since it was saved" in message
    settings = re.findall(r"trainer\.resume_\w+=\S+", message)
    assert settings == ["trainer.resume_mode=from_path", f"trainer.resume_path={folder}/global_step_1"]
    train(*settings)
    assert find_damage(folder / "global_step_2") == []


@pytest.mark.parametrize("lora", [[], ["trainer.policy.model.lora.rank=4"]])
def test_a_changed_byte_in_any_file_is_named(train: Callable[..., Path], lora: list[str]) -> None:
    folder = train("trainer.max_training_steps=1", *lora) / "ckpts/global_step_1"
    assert (folder / "policy/lora_adapter/adapter_model.safetensors").exists() == bool(lora)
    assert_a_changed_byte_is_named(folder)


LIMIT_FILES = """
import resource, sys
from examples.catch.main_catch import register_catch
from skyrl_train.callbacks import Callback
from skyrl_train.entrypoints.main_base import BasePPOExp, parse_cli, run_command

class LimitFiles(Callback):
    async def {method}(self, run, report_or_path):
        if "{method}" == "on_checkpoint" and report_or_path.name != "global_step_2":
            return
        if run.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))

class Experiment(BasePPOExp):
    def get_callbacks(self, *parts):
        return [LimitFiles(), *super().get_callbacks(*parts)]

register_catch()
run_command(lambda: Experiment(parse_cli(sys.argv[1:])).run())
"""


@pytest.mark.parametrize(
    ("method", "failure", "left"),
    [
        ("on_step_end", "cannot save the checkpoint of step 2 in {0}/ckpts: the policy could not be written: ", []),
        ("on_checkpoint", "cannot export step 2 to {0}/export/global_step_2: the policy could not be written: ", [2]),
    ],
)
def test_a_file_that_cannot_be_written_ends_the_run_with_one_message_and_leaves_room(
    train: Callable[..., Path], catch_run: list[str], tmp_path: Path, method: str, failure: str, left: list[int]
) -> None:
    overrides = ["trainer.ckpt_interval=1", "trainer.eval_interval=-1", "trainer.hf_save_interval=2"]
    script = LIMIT_FILES.replace("{method}", method)
    command = [sys.executable, "-c", script, *catch_run, *overrides]
    done = subprocess.run(command, cwd=TRAIN_FOLDER, capture_output=True, text=True, timeout=200, check=False)
    folder = tmp_path / "skyrl/test_run"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {failure.format(folder)}")
    assert "File too large" in error
    assert error.endswith(f"the same command then resumes from step {max([1, *left])}")
    assert list(folder.glob("*/.global_step_*")) == [], "incomplete folders take up room"
    assert not (folder / "export/global_step_2").exists()
    train("trainer.hf_save_interval=2")
    assert (folder / "export/global_step_2/policy/model.safetensors").exists()


def test_a_disk_that_is_full_for_a_while_costs_no_metrics_and_the_next_step_is_saved(
    catch_run: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """During steps 1 and 2 of 4, files cannot grow; the run has a checkpoint interval of 2."""
    folder, alerts = tmp_path / "skyrl/test_run", list[str]()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    class FillDisk(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            while report.global_step == 3 and run.is_saving:  # step 2, which fails
                await asyncio.sleep(0.01)
            is_full = report.global_step in (1, 2)
            size = (folder / "metrics.jsonl").stat().st_size if report.global_step else 0
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]) if is_full else limits)

        async def on_alert(self, run: Run, text: str) -> None:
            alerts.append(text)

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [FillDisk(), *super().get_callbacks(*parts)]  # type: ignore[arg-type]

    overrides = ["trainer.ckpt_interval=2", "trainer.eval_interval=-1", "trainer.epochs=2"]
    try:
        Experiment(parse_cli([*catch_run, *overrides])).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in folder.glob("ckpts/global_step_*")) == ["global_step_3", "global_step_4"]
    assert list(folder.glob("ckpts/.global_step_*")) == []
    assert any("cannot save the checkpoint of step 2" in text for text in alerts)
    assert "Storage: Logging failed at step 2: [Errno 27] File too large. Training continues" in caplog.text
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["storage/alerts"] == len(alerts)


def test_training_continues_while_a_checkpoint_is_written(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 1 is written only after step 2 is trained, and holds the weights of step 1."""
    folder, step_2 = tmp_path / "skyrl/test_run", threading.Event()
    sync_tree, states = durable.sync_tree, list[bool]()

    def slow_sync(path: Path) -> None:
        if "global_step_1." in path.name:
            states.append(step_2.wait(60))
        sync_tree(path)

    class Experiment(BasePPOExp):
        class trainer_class(Trainer):
            async def update(self, step: Step, batch: TrainingBatch) -> None:
                await super().update(step, batch)
                if step.number == 2:
                    step_2.set()

    overrides = ["trainer.ckpt_interval=1", "trainer.eval_interval=-1", "generator.batched=true"]
    with monkeypatch.context() as patch:
        patch.setattr("skyrl_train.checkpoint.store.sync_tree", slow_sync)
        Experiment(parse_cli([*catch_run, *overrides])).run()
    assert states == [True]
    weights = torch.load(folder / "ckpts/global_step_2/driver.pt", weights_only=True)["global_step"]
    assert weights == 2
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    shutil.rmtree(folder / "ckpts/global_step_2")
    (folder / "ckpts/latest_ckpt_global_step.txt").write_text("1")
    main([*catch_run, *overrides])
    again = (folder / "metrics.jsonl").read_text().splitlines()
    untimed = [
        {k: v for k, v in json.loads(line).items() if not k.startswith(("timing", "trainer", "storage"))}
        for line in (metrics[-1], again[-1])
    ]
    assert untimed[0] == untimed[1], "step 2 from the checkpoint of step 1 is step 2"


def test_a_log_on_a_full_disk_is_warned_of_once_and_does_not_end_the_run(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "skyrl/test_run"
    folder.mkdir(parents=True)
    (folder / "train.log").symlink_to("/dev/full")
    train()
    assert pointed_step(folder) == 2
    assert caplog.text.count("train.log lacks the last messages: [Errno 28] No space left on device") == 1
    assert "Logging error" not in capsys.readouterr().err


def test_a_full_disk_ends_a_run_with_one_message(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "skyrl/test_run"
    folder.mkdir(parents=True)
    for name in ("config.yaml", "train.log"):
        (folder / name).symlink_to("/dev/full")
    with pytest.raises(SystemExit) as stop:
        train()
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert (
        f"error: a file of the run in {folder} could not be written: [Errno 28] No space left on device. Free disk "
        "space; the same command then starts again, because there is no checkpoint"
    ) in error
    assert "Traceback" not in error


def test_an_interrupted_export_is_absent_and_written_on_resume(
    train: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = Learner.export

    async def killed(self: Learner, folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy/config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(Learner, "export", killed)
    with pytest.raises(SystemExit):
        train("trainer.hf_save_interval=2")
    folder = tmp_path / "skyrl/test_run"
    assert not (folder / "export/global_step_2").exists()
    monkeypatch.setattr(Learner, "export", export)
    train("trainer.hf_save_interval=2")
    assert {path.name for path in (folder / "export").iterdir()} == {".lock", "global_step_2"}
    assert (folder / "export/global_step_2/policy/model.safetensors").stat().st_size > 10_000


def test_a_second_process_on_a_run_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    hold = (
        "import sys, time; from pathlib import Path; from skyrl_train.checkpoint import folder_lock\n"
        "with folder_lock(Path(sys.argv[1]), ''): print('held', flush=True); time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == "held\n"
        holder = rf"{tmp_path} is in use by process {first.pid} on \S+; wait for it"
        with pytest.raises(ConfigError, match=holder), folder_lock(tmp_path, "wait for it"):
            pytest.fail("two processes hold the lock of one folder")
    finally:
        first.kill()
        first.wait()
    with folder_lock(tmp_path, "wait for it"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] != first.pid, "a crash releases the lock"


def test_a_lock_of_another_user_is_named() -> None:
    script = (
        "import os, sys; from pathlib import Path; from skyrl_train.checkpoint import folder_lock\n"
        "os.getuid() or os.setuid(65534)\n"
        "with folder_lock(Path(sys.argv[1]), ''): pass"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        Path(folder, ".lock").touch(0o444)
        done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=False)
    assert f"{folder}/.lock cannot be written by this user; it was created by another process" in done.stderr


def test_a_run_locks_its_folder_while_it_trains(catch_run: list[str], tmp_path: Path) -> None:
    error_messages: list[str] = []

    class StartSecondRun(Callback):
        async def on_step_end(self, run: Run, report: object) -> None:
            command = [sys.executable, "-m", "examples.catch.main_catch", *catch_run]
            second = await asyncio.to_thread(
                subprocess.run, command, cwd=TRAIN_FOLDER, capture_output=True, text=True, check=False
            )
            error_messages.append(second.stderr)
            run.request_stop("the test is done")

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [StartSecondRun()]

    with pytest.raises(KeyboardInterrupt):
        Experiment(parse_cli(catch_run)).run()
    assert "is in use by process" in error_messages[0]
    assert "give this run another trainer.run_name" in error_messages[0]


@pytest.mark.parametrize(
    ("key", "name", "overrides"),
    [("ckpt_path", "ckpts", []), ("export_path", "export", ["trainer.hf_save_interval=1"])],
)
@pytest.mark.parametrize("output_dir", [".", "absolute"])
@pytest.mark.parametrize("is_default", [True, False])
def test_a_folder_of_checkpoints_or_exports_belongs_to_one_run(
    catch_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    name: str,
    overrides: list[str],
    output_dir: str,
    is_default: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "skyrl/first" / name if is_default else tmp_path / "shared"
    output_dir = output_dir if output_dir == "." else str(tmp_path)
    common = [*catch_run, f"trainer.output_dir={output_dir}", *overrides]
    first = [*common, "trainer.run_name=first", *([] if is_default else [f"trainer.{key}=shared"])]
    second = [*common, "trainer.run_name=second", f"trainer.{key}={path}"]
    holder = re.escape(f"{path} is in use by process {os.getpid()} on {socket.gethostname()}")
    message = rf"{holder}, which runs {tmp_path}/skyrl/first; wait until it ends, or set another trainer\.{key}$"
    with (
        BasePPOExp(parse_cli(first)).running(),
        pytest.raises(ConfigError, match=message),
        BasePPOExp(parse_cli(second)).running(),
    ):
        pytest.fail("two runs use one folder")
    with BasePPOExp(parse_cli(second)).running():
        pass


def test_a_run_that_uses_one_folder_for_all_of_its_files_is_not_refused(catch_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "skyrl/test_run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "skyrl/test_run")
    folders = [f"trainer.ckpt_path={tmp_path}/link", f"trainer.export_path={tmp_path}/skyrl/../skyrl/test_run"]
    with BasePPOExp(parse_cli([*catch_run, *folders, "trainer.hf_save_interval=1"])).running():
        assert json.loads((tmp_path / "skyrl/test_run/.lock").read_text())["pid"] == os.getpid()


def test_an_error_that_is_not_of_the_disk_ends_the_run_in_the_step_that_is_saved(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Worker, folder: Path) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(Worker, "begin_save", fail)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        BasePPOExp(parse_cli([*catch_run, "trainer.ckpt_interval=1", "trainer.eval_interval=-1"])).run()
    rows = [json.loads(line) for line in (tmp_path / "skyrl/test_run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert "storage/alerts" not in rows[-1]


def test_a_stop_requested_after_the_checkpoint_of_a_step_saves_the_step(catch_run: list[str], tmp_path: Path) -> None:
    class StopLast(Callback):
        async def on_step_end(self, run: Run, report: StepReport) -> None:
            if report.global_step == 1:
                run.request_stop("after the callback that saves")

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [*super().get_callbacks(*parts), StopLast()]  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        Experiment(parse_cli([*catch_run, "trainer.ckpt_interval=10", "trainer.eval_interval=-1"])).run()
    assert pointed_step(tmp_path / "skyrl/test_run") == 1


async def test_saving_does_not_block_the_event_loop_and_callbacks_follow_the_pointer(
    catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file sync waits until the event loop has run, so a blocked loop would never finish the save."""
    save, steps = CheckpointStore.save, list[int]()

    async def watched_save(self: CheckpointStore, *arguments: object) -> Path:
        loop, loop_ran = asyncio.get_running_loop(), list[bool]()

        def wait_for_the_loop(descriptor: int) -> None:
            ran = threading.Event()
            loop.call_soon_threadsafe(ran.set)
            loop_ran.append(ran.wait(20))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", wait_for_the_loop)
            path = await save(self, *arguments)  # type: ignore[arg-type]
        assert len(loop_ran) > 5
        assert all(loop_ran)
        return path

    class StepRecorder(Callback):
        async def on_checkpoint(self, run: Run, path: Path) -> None:
            pointer = path.parent / "latest_ckpt_global_step.txt"
            assert path.name == f"global_step_{int(pointer.read_text())}"
            steps.append(run.global_step)

    class Experiment(BasePPOExp):
        def get_callbacks(self, *parts: object) -> list[Callback]:
            return [*super().get_callbacks(*parts), StepRecorder()]  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "save", watched_save)
    overrides = [*catch_run, "trainer.ckpt_interval=2", "trainer.eval_interval=-1"]
    await asyncio.to_thread(Experiment(parse_cli(overrides)).run)
    assert steps == [2]


def test_a_finished_run_says_how_to_continue(train: Callable[..., Path]) -> None:
    log = train("trainer.max_training_steps=1") / "train.log"
    assert "This run is finished" not in log.read_text()
    train("trainer.max_training_steps=1")
    assert "This run is finished after its 1 steps. Set trainer.run_name" in log.read_text()


class Intruder:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_a_checkpoint_runs_no_code(train: Callable[..., Path], tmp_path: Path) -> None:
    folder = train("trainer.max_training_steps=1") / "ckpts/global_step_1"
    torch.save(Intruder(tmp_path / "intruder"), folder / "driver.pt")
    (folder / "checksums.json").unlink()
    write_manifest(folder)
    with pytest.raises(SystemExit):
        train()
    assert not (tmp_path / "intruder").exists()


def test_a_checkpoint_of_an_older_version_is_refused_by_name(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train("trainer.max_training_steps=1") / "ckpts/global_step_1"
    (folder / "checksums.json").unlink()
    with pytest.raises(SystemExit):
        train()
    message = capsys.readouterr().err
    assert f"cannot resume from {folder}: checksums.json is missing" in message
    assert "an older version wrote it" in message
    assert "set trainer.resume_mode=none to start again" in message
