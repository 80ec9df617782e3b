"""Each wait of a step is hung for real: the watchdog names it, and its limit ends it."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from train_kit.processes import TRAIN_FOLDER, python, wait_until
from train_kit.runs import run_of, train, train_with

from examples.catch.env import CatchEnv
from skyrl_train.callbacks import Callback, Run
from skyrl_train.checkpoint import store
from skyrl_train.dataset.order import ShuffledPrompts
from skyrl_train.entrypoints import base
from skyrl_train.errors import EnvError, StalledError
from skyrl_train.generators.gym_generator import GymGenerator
from skyrl_train.generators.rewards import REWARD_FUNCTIONS, register_reward_function
from skyrl_train.inference_engines.hf.packed import PackedEngine
from skyrl_train.tracking.tracker import ConsoleTracker
from skyrl_train.watchdog import DATA, ENGINE, Wait, Watchdog
from skyrl_train.workers.worker import Worker


class Hang(Callback, logging.Handler):
    """A function whose first call hangs until its run ends, or until a warning of the watchdog matches `ends_with`.

    On a busy machine, the watchdog may also warn of other waits, such as a slow disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        logging.Handler.__init__(self)
        self.warnings: list[str] = []
        self.is_over = threading.Event()
        self.ends_with: str | None = None
        self._has_begun = False
        self._watchdogs: list[Watchdog] = []

        class Patient(Watchdog):
            """A watchdog without limits until the hang begins, since a busy machine may need seconds to start."""

            def __init__(watchdog, folder: Path, *_: float | None) -> None:
                super().__init__(folder, None, None)
                watchdog.interval_s = 0.05
                self._watchdogs.append(watchdog)

        monkeypatch.setattr(base, "Watchdog", Patient)

    def blocking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self._begin():
                self.is_over.wait()
            return original(*args, **options)

        return call

    def awaiting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            if self._begin():
                while not self.is_over.is_set():
                    await asyncio.sleep(0.02)
            return await original(*args, **options)

        return call

    def _begin(self) -> bool:
        if self._has_begun:
            return False
        self._has_begun = True
        self._watchdogs[-1].warn_after_s = 0.3
        self._watchdogs[-1].limit_s = 3.0 if self.ends_with is None else None
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "skyrl_train.watchdog":
            self.warnings.append(record.getMessage())
            if self.ends_with is not None and re.search(self.ends_with, self.warnings[-1]):
                self.is_over.set()

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        self.is_over.set()
        self._watchdogs[-1].warn_after_s = self._watchdogs[-1].limit_s = None


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang(monkeypatch)
    logging.getLogger("skyrl_train.watchdog").addHandler(hang)
    yield hang
    logging.getLogger("skyrl_train.watchdog").removeHandler(hang)
    hang.is_over.set()


class Case(NamedTuple):
    owner: Any
    function: str
    warning: str
    outcome: str  # stop reason of the trajectory, "ends" for the run, or "continues" after the warning
    override: str = "trainer.ckpt_interval=1"
    is_async: bool = False


CASES = {
    "step": Case(CatchEnv, "step", "environment: 1 waiting.*catch train-0-.*, step", "stalled"),
    "step with its own limit": Case(
        *(CatchEnv, "step", r"environment: 1 waiting.* ends after 1 s \(.*call_timeout_seconds\)", "env_timeout"),
        "environment.skyrl_gym.call_timeout_seconds=1",
    ),
    "init": Case(CatchEnv, "init", "environment: 1 waiting.*, init", "stalled"),
    "reward function": Case(None, "grade", r"reward function: 1 waiting.*grade, \d samples", "reward_unknown"),
    "engine": Case(PackedEngine, "_step", r"engine: \d+ waiting.*generate", "all", is_async=True),
    "weight sync": Case(PackedEngine, "_load_weights", "weight sync: 1 waiting.*step 0", "ends", is_async=True),
    "rank": Case(Worker, "optim_step", "model: 1 waiting.*rank 0 of the policy, optim_step", "ends"),
    "checkpoint": Case(store, "sync_tree", "checkpoint: 1 waiting.*ckpts, checkpoint in progress", "ends"),
    "tracker": Case(
        ConsoleTracker, "log", "tracker: 1 waiting.*ConsoleTracker, log", "continues", "trainer.logger=console"
    ),
    "data": Case(ShuffledPrompts, "next_batch", "data: 1 waiting.*step 1", "continues"),
    "custom generator": Case(GymGenerator, "rollout", "rollouts: 1 waiting.*step 1", "continues", is_async=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_hanging_wait_is_named_and_ended(
    case: Case, hang: Hang, catch_run: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hang.ends_with = case.warning if case.outcome == "continues" else None
    overrides = [*catch_run, "environment.skyrl_gym.call_timeout_seconds=null", case.override]
    overrides += [
        "environment.skyrl_gym.max_env_workers=8",
        "generator.n_rollout_retries=1",
        "trainer.eval_interval=-1",
    ]
    patch = hang.awaiting if case.is_async else hang.blocking
    if case.owner is None:
        monkeypatch.setattr("skyrl_train.generators.rewards.REWARD_FUNCTIONS", REWARD_FUNCTIONS.copy())
        register_reward_function("grade")(patch(lambda samples: [1.0] * len(samples)))
        overrides.append("generator.reward_functions=[grade]")
    else:
        monkeypatch.setattr(case.owner, case.function, patch(getattr(case.owner, case.function)))
    if case.outcome == "ends":
        with pytest.raises(StalledError, match=r"limit_seconds=3 s") as raised:
            train_with(*overrides, first=[hang])
        assert raised.value.exit_status == 5
    elif case.outcome == "all":
        with pytest.raises(EnvError, match=r"(\d+) of \1 rollouts at step 1 failed.*engine .*limit_seconds=3 s"):
            train_with(*overrides, first=[hang])
    else:
        metrics = train_with(*overrides, first=[hang]).metrics
        assert metrics[-1]["step"] == 2
        if case.outcome in ("stalled", "reward_unknown"):
            assert metrics[1][f"generate/n_invalid/{case.outcome}"] == metrics[1]["generate/n_invalid"] > 0
        elif case.outcome == "env_timeout":
            assert metrics[1]["generate/n_retries"] == 1
    assert any(re.search(case.warning, text) for text in hang.warnings), hang.warnings
    stacks = (run_of(overrides).folder / "stacks.txt").read_text()
    assert re.search(r"> call \(test_watchdog" if case.is_async else r"self\.is_over\.wait\(\)", stacks), stacks


SCRIPT = """
import sys, time
from skyrl_train import watchdog
from skyrl_train.compat import cli
from skyrl_train.tracking.tracker import ConsoleTracker
from examples.catch.main_catch import register_catch

register_catch()
log = ConsoleTracker.log

def hang(self, metrics, step):
    log(self, metrics, step)
    if step == 2:
        time.sleep(1000)

ConsoleTracker.log = hang
watchdog.GRACE_S, watchdog.LIVE_AFTER_S = 1.0, 0.5
sys.exit(cli.main(["train", *sys.argv[1:]]))
"""


def test_a_run_that_cannot_be_cancelled_ends_with_status_5_and_resumes(catch_run: list[str], tmp_path: Path) -> None:
    """The event loop hangs in a tracker. The live file and SIGUSR1 show it, and the limit ends the process."""
    overrides = [*catch_run, "trainer.eval_interval=-1", "trainer.ckpt_interval=1", "trainer.max_training_steps=3"]
    overrides += ["trainer.epochs=2"]
    folder = run_of(overrides).folder
    (script := tmp_path / "run.py").write_text(SCRIPT)
    limits = ["trainer.watchdog.warn_after_seconds=100", "trainer.watchdog.limit_seconds=10", "trainer.logger=console"]
    started = subprocess.Popen(
        [python(), str(script), *overrides, *limits], cwd=TRAIN_FOLDER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    live = folder / "waits.json"
    wait_until(lambda: (live.exists() and "tracker" in live.read_text()) or started.poll() is not None)
    assert started.poll() is None, started.communicate()[0].decode()
    found = json.loads(live.read_text())
    (wait,) = (wait for wait in found["waits"] if wait["stage"] == "tracker")
    assert (wait["oldest"]["who"], wait["limit_seconds"]) == ("ConsoleTracker", 10)
    os.kill(found["pid"], signal.SIGUSR1)
    output = started.communicate()[0].decode()
    assert started.returncode == 5, output
    assert re.search(
        r"Waits of this process:\n  run: 1 waiting.*\n  callback: 1 waiting.*Logging.*\n  tracker: 1 waiting", output
    ), output
    assert "time.sleep(1000)" in output
    assert re.search(r"error: tracker \(ConsoleTracker, log of step 2\).*it cannot be cancelled", output), output
    resumed = train(*overrides)
    assert resumed.steps == [0, 1, 2, 3]
    assert "Resumed from" in resumed.log


@pytest.mark.asyncio
async def test_other_cancellations_and_moving_waits_are_left_alone(tmp_path: Path) -> None:
    """Requests of an engine count as stuck only while none ends, and an outer wait only while nothing moves."""
    with Watchdog(tmp_path, 0.3, 0.5):

        async def wait_long() -> None:
            with Wait(ENGINE, "slow request"):
                await asyncio.sleep(5)

        slow = asyncio.create_task(wait_long())
        for _ in range(12):
            with Wait(ENGINE, "fast request"):
                await asyncio.sleep(0.1)
        with Wait(DATA), pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.sleep(1)
        cancelled = asyncio.create_task(wait_long())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(StalledError, match=r"engine .slow request.: no answer"):
            await slow
