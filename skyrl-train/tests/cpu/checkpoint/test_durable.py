import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from train_kit.processes import python, run_python
from train_kit.runs import AtStepEnd, train_with

from skyrl_train.callbacks import Run
from skyrl_train.checkpoint import disk_error, folder_lock
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.entrypoints.main_base import parse_cli
from skyrl_train.errors import ConfigError


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    hold = (
        "import os, sys, time; from pathlib import Path; from skyrl_train.checkpoint import folder_lock\n"
        "with folder_lock(Path(sys.argv[1]), ''): print(os.getpid(), flush=True); time.sleep(600)"
    )
    with subprocess.Popen([python(), "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        holder = rf"{tmp_path} is in use by process {pid} on \S+; wait for it"
        with pytest.raises(ConfigError, match=holder), folder_lock(tmp_path, "wait for it"):
            pytest.fail("two processes hold the lock of one folder")
        os.kill(pid, signal.SIGKILL)
    with folder_lock(tmp_path, "wait for it"):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] != pid, "a crash releases the lock"


def test_a_lock_of_another_user_is_named() -> None:
    script = (
        "import os, sys; from pathlib import Path; from skyrl_train.checkpoint import folder_lock\n"
        "os.getuid() or os.setuid(65534)\n"
        "with folder_lock(Path(sys.argv[1]), ''): pass"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        Path(folder, ".lock").touch(0o444)
        messages = run_python("-c", script, folder, status=1)
    assert f"cannot write {folder}/.lock as this user, because another process created it" in messages


def test_a_run_locks_its_folder_while_it_trains(catch_run: list[str]) -> None:
    messages: list[str] = []

    def start_another(run: Run, step: int) -> None:
        with pytest.raises(ConfigError) as error, RLExperiment(parse_cli(catch_run)).running():
            pytest.fail("two runs use one folder")
        messages.append(str(error.value))
        run.request_stop("the test is done")

    with pytest.raises(KeyboardInterrupt):
        train_with(*catch_run, first=[AtStepEnd(start_another)])
    assert f"is in use by process {os.getpid()}" in messages[0]
    assert "give this run another trainer.run_name" in messages[0]


@pytest.mark.parametrize(
    ("key", "output_dir", "is_default"),
    [
        ("ckpt_path", ".", True),
        ("ckpt_path", "absolute", False),
        ("export_path", ".", False),
        ("export_path", "absolute", True),
    ],
)
def test_a_folder_of_checkpoints_or_exports_belongs_to_one_run(
    catch_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, output_dir: str, is_default: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    name = {"ckpt_path": "ckpts", "export_path": "export"}[key]
    path = tmp_path / "skyrl/first" / name if is_default else tmp_path / "shared"
    output_dir = output_dir if output_dir == "." else str(tmp_path)
    common = [*catch_run, f"trainer.output_dir={output_dir}", "trainer.hf_save_interval=1"]
    first = [*common, "trainer.run_name=first", *([] if is_default else [f"trainer.{key}=shared"])]
    second = [*common, "trainer.run_name=second", f"trainer.{key}={path}"]
    holder = re.escape(f"{path} is in use by process {os.getpid()} on {socket.gethostname()}")
    message = rf"{holder}, which runs {tmp_path}/skyrl/first; wait until it ends, or set another trainer\.{key}$"
    with (
        RLExperiment(parse_cli(first)).running(),
        pytest.raises(ConfigError, match=message),
        RLExperiment(parse_cli(second)).running(),
    ):
        pytest.fail("two runs use one folder")
    with RLExperiment(parse_cli(second)).running():
        pass


def test_a_run_that_uses_one_folder_for_all_of_its_files_is_not_refused(catch_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "skyrl/test_run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "skyrl/test_run")
    folders = [f"trainer.ckpt_path={tmp_path}/link", f"trainer.export_path={tmp_path}/skyrl/../skyrl/test_run"]
    with RLExperiment(parse_cli([*catch_run, *folders, "trainer.hf_save_interval=1"])).running():
        assert json.loads((tmp_path / "skyrl/test_run/.lock").read_text())["pid"] == os.getpid()


def test_the_error_of_the_disk_is_found_behind_that_of_a_writer() -> None:
    """PyTorch answers a full disk with "unexpected pos", raised while it handles the OSError."""

    class Writer:
        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("unexpected pos 704 vs 598")

    def write() -> None:
        with open("/dev/full", "wb", buffering=0) as full, Writer():
            full.write(b"content")

    with pytest.raises(RuntimeError, match="unexpected pos") as caught:
        write()
    assert str(disk_error(caught.value)) == "[Errno 28] No space left on device"
    unrelated = ValueError("not of the disk")
    assert disk_error(unrelated) is unrelated
