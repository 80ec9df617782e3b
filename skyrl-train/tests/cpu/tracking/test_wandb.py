import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from train_kit.processes import python

from skyrl_train.tracking import Tracking


def run_offline(home: Path, code: str, *arguments: object, **variables: str) -> str:
    """Run code with wandb's offline mode and without its other settings; return the output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"WANDB_MODE": "offline", "HOME": str(home), **variables}
    return subprocess.check_output([python(), "-c", code, *map(str, arguments)], env=environ, text=True, timeout=120)


_RESUMED_RUN = """
import asyncio, sys, threading, wandb
from pathlib import Path
from types import SimpleNamespace
from skyrl_train.callbacks import Logging
from skyrl_train.tracking import Tracking
folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with Tracking("catch", "shaped", "wandb", {"trainer": {"seed": 1}}, folder / "run") as tracking:
    tracking.truncate_after(first - 1 or -1)
    for step in range(first, last + 1):
        thread = threading.Thread(target=wandb.log, args=({f"my_reward/{step}": 0.25},))
        thread.start()
        thread.join()
        tracking.log({f"reward/step_{step}": step / 8}, step=step)
    checkpoint = folder / f"global_step_{last}"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "weights.pt").write_bytes(b"weights")
    trainer = SimpleNamespace(wandb_artifacts=True)
    run = SimpleNamespace(cfg=SimpleNamespace(trainer=trainer), global_step=last + 7)  # training continued meanwhile
    asyncio.run(Logging(tracking).on_checkpoint(run, checkpoint))
"""


def log_offline(folder: Path, first: int, last: int, **variables: str) -> str:
    """Log steps in another process; return the wandb run's ID."""
    run_offline(folder, _RESUMED_RUN, folder, first, last, **variables)
    return (folder / "run/wandb_run_id.txt").read_text()


def offline_logs(folder: Path) -> dict[str, bytes]:
    """Return the content of each log by its name. Names end with the run's ID."""
    files = (folder / "run/wandb").glob("offline-run-*/*.wandb")
    return {file.parent.name: file.read_bytes() for file in files}


@pytest.mark.nightly
def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path) -> None:
    run_id = log_offline(tmp_path, 1, 2, WANDB_TAGS="fleet,tool_use", WANDB_RUN_GROUP="pilot")
    (log,) = offline_logs(tmp_path).values()
    for expected in (b"reward/step_2", b"my_reward/1", b"my_reward/2", b"tool_use", b"pilot", b"global_step"):
        assert expected in log
    assert b"shaped-checkpoint" in log
    assert b"step-2" in log
    assert b"step-9" not in log
    assert log_offline(tmp_path, 3, 4) == run_id
    assert all(name.endswith(run_id) for name in offline_logs(tmp_path))
    assert any(b"my_reward/4" in log and b"reward/step_4" in log for log in offline_logs(tmp_path).values())
    assert log_offline(tmp_path, 1, 1) != run_id  # from the beginning
    assert log_offline(tmp_path, 1, 1, WANDB_RUN_ID="mine") == "mine"


_RUNS = """
import sys
from pathlib import Path
from skyrl_train.config.cli import parse_cli
from skyrl_train.entrypoints.evaluation import EvaluationExperiment
from skyrl_train.entrypoints.experiment import RLExperiment
from skyrl_train.errors import ConfigError
root = Path(sys.argv[1])
def start(outputs, checkpoints, kind=RLExperiment):
    options = ["trainer.logger=wandb", "trainer.project_name=p", "trainer.run_name=run"]
    paths = [f"trainer.output_dir={root}/{outputs}", f"trainer.ckpt_path={root}/{checkpoints}"]
    experiment = kind(parse_cli([*options, *paths]))
    with experiment.running(), experiment.get_tracker() as tracker:
        tracker.log({"reward/avg_raw_reward": 0.5}, step=1)
        if outputs == "first":
            try:
                start("refused", checkpoints)
            except ConfigError as error:
                assert "is in use by process" in str(error), error
            else:
                raise AssertionError("two runs wrote into one folder of checkpoints")
for outputs, checkpoints, folder in (
    ("first", "sft", "sft"),
    ("second", "sft", "sft"),
    ("first", "rl", "rl"),
    ("third", "third/p/run/ckpts", "third/p/run"),
):
    start(outputs, checkpoints)
    print((root / folder / "wandb_run_id.txt").read_text())
start("evaluation", "sft", EvaluationExperiment)
print((root / "sft/wandb_run_id.txt").read_text(), (root / "evaluation/p/run/wandb_run_id.txt").read_text())
"""


def test_offline_runs_need_no_key_and_share_the_wandb_run_of_their_checkpoints(tmp_path: Path) -> None:
    first, second, *others, after_evaluation, evaluation = run_offline(tmp_path, _RUNS, tmp_path).split()
    assert first == second == after_evaluation
    assert len({first, *others, evaluation}) == 4
    logs = list(tmp_path.glob("*/p/run/wandb/offline-run-*/*.wandb"))
    assert len(logs) == 5
    assert all(b"reward/avg_raw_reward" in log.read_bytes() for log in logs)
    assert (tmp_path / "first/p/run/metrics.jsonl").exists()


_LOST_PROCESS = """
import logging, sys
from pathlib import Path
import psutil
from skyrl_train.tracking import Tracking
logging.basicConfig(stream=sys.stdout, format="%(message)s")
folder = Path(sys.argv[1])
with Tracking("catch", "shaped", "wandb", {}, folder) as tracking:
    tracking.log({"reward": 0.5}, step=1)
    processes = psutil.Process().children(recursive=True)
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)
    for step in (2, 3):
        tracking.log({"reward": 0.5}, step=step)
print(len((folder / "metrics.jsonl").read_text().splitlines()), "steps")
"""


def test_a_run_outlives_the_process_of_wandb(tmp_path: Path) -> None:
    output = run_offline(tmp_path, _LOST_PROCESS, tmp_path / "run")
    assert output.count("wandb failed") == 1
    assert output.endswith("3 steps\n")


class ClosedError(Exception):
    """Like wandb's `MailboxClosedError` and `CommError`, which are no OSErrors."""


@pytest.mark.parametrize("method", ["log", "log_artifact", "finish"])
@pytest.mark.parametrize("error", [ClosedError("closed"), BrokenPipeError("Connection lost")])
def test_an_error_of_wandb_is_a_warning(
    method: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, wandb = MagicMock(), MagicMock(Error=ClosedError)
    wandb.__spec__ = run  # importlib looks for one
    wandb.init.return_value = run
    getattr(run, method).side_effect = error
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Tracking("catch", "shaped", "wandb", {}, tmp_path) as tracking:
        tracking.log({"reward": 0.5}, step=1)
        tracking.log_checkpoint(tmp_path, 1)
    assert run.log.called
    assert run.log_artifact.called
    assert run.finish.called
    assert [record.getMessage() for record in caplog.records if "wandb failed" in record.getMessage()] == [
        "wandb failed, and may lack the metrics from here on; metrics.jsonl has them all: "
        f"{type(error).__name__}: {error}"
    ]
