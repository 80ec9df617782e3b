"""Real child processes that stand in for an engine that works, dies, or never responds."""

import asyncio
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tx_kit.fake_engine import STATE
from tx_kit.processes import child_environment
from tx_kit.rows import add_rows

from tx.tinker.config import TxConfig
from tx.tinker.db_models import STALLED, EngineState
from tx.tinker.doorbell import UNUSABLE
from tx.tinker.server import supervisor as supervision
from tx.tinker.server.service import Service
from tx.tinker.server.supervisor import Supervisor

BELL = "import sys; from tx.tinker.doorbell import Doorbell; bell = Doorbell.from_fd(int(sys.argv[2]))\n"
ECHO = BELL + "while not bell.is_hung_up:\n    if bell.wait(10) and not bell.is_hung_up: bell.ring()\n"


@pytest.fixture(autouse=True)
def _import_as_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])


def child(program: str) -> tuple[str, ...]:
    return sys.executable, "-c", textwrap.dedent(program)


def supervise(
    program: str | tuple[str, ...], folder: Path, on_ring: Callable[[], None] = lambda: None, **settings: float
) -> Supervisor:
    config = TxConfig(base_model="org/m", checkpoints_base=folder, **settings)
    command = child(program) if isinstance(program, str) else program
    return Supervisor(config, on_ring, command=command, first_pause_sec=0.01)


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(40):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_both_sides_can_ring(tmp_path: Path) -> None:
    rung = asyncio.Event()
    supervisor = supervise(ECHO, tmp_path, rung.set)
    supervisor.wake()  # no engine is running
    async with running(supervisor):
        await until(lambda: supervisor.is_running)
        supervisor.wake()
        await asyncio.wait_for(rung.wait(), 20)
    assert not supervisor.is_running


async def test_it_restarts_a_dead_engine(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    program = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True)\n" + ECHO
    supervisor = supervise(program, tmp_path)

    def found() -> list[int]:
        return [int(line) for line in pids.read_text().splitlines()] if pids.exists() else []

    async with running(supervisor):
        for n_starts in (1, 2, 3):
            await until(lambda n=n_starts: len(found()) == n)  # type: ignore[misc]
            os.kill(found()[-1], signal.SIGKILL)
        await until(lambda: len(found()) == 4)
    assert supervisor.n_starts == 4
    for pid in found():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("raise SystemExit('no such model')", "exit status 1; its last output: no such model"),
        (("/nowhere/python",), "FileNotFoundError"),
    ],
)
async def test_it_gives_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str | tuple[str, ...], words: str
) -> None:
    rung = asyncio.Event()
    supervisor = supervise(program, tmp_path, rung.set)
    async with running(supervisor) as task:
        await asyncio.wait_for(task, 30)
    assert supervisor.n_starts == supervision.MAX_FAST_DEATHS
    assert "died 5 times" in (supervisor.failure or "")
    assert words in (supervisor.failure or "")
    assert rung.is_set()
    assert ("no such model" in capfd.readouterr().err) == ("no such model" in words)


async def test_it_does_not_restart_an_unusable_engine(tmp_path: Path) -> None:
    program = f"import sys; print('no such model', file=sys.stderr); sys.exit({UNUSABLE})"
    for source, expected in ((program, "no such model"), (f"raise SystemExit({UNUSABLE})", "nothing")):
        supervisor = supervise(source, tmp_path)
        async with running(supervisor) as task:
            await asyncio.wait_for(task, 30)
        assert (supervisor.n_starts, supervisor.unusable, supervisor.failure) == (1, expected, None)


@pytest.mark.parametrize("stable_sec", [supervision.STABLE_SEC, 0.0])
async def test_an_engine_that_was_usable_before_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stable_sec: float
) -> None:
    """The folder may be unavailable for a moment. It is given up at last, however long it takes to find out."""
    monkeypatch.setattr(supervision, "STABLE_SEC", stable_sec)
    started = str(tmp_path / "started")
    program = f"""
        import pathlib, sys
        if pathlib.Path({started!r}).exists(): sys.exit({UNUSABLE})
        pathlib.Path({started!r}).touch()
    """
    supervisor = supervise(program, tmp_path)
    async with running(supervisor) as task:
        await asyncio.wait_for(task, 30)
    assert (supervisor.n_starts, supervisor.unusable) == (supervision.MAX_FAST_DEATHS, None)
    assert "its last output: nothing" in (supervisor.failure or "")


async def test_it_does_not_give_up_while_there_are_results(tmp_path: Path) -> None:
    """Requests that kill engines are given up one by one; those behind them are not."""
    supervisor = supervise(BELL + "bell.ring()\nraise SystemExit('by test')", tmp_path)
    async with running(supervisor):
        await until(lambda: supervisor.n_starts > supervision.MAX_FAST_DEATHS + 1)
    assert supervisor.failure is None


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, is_killed: bool) -> None:
    """After a while, or on request."""
    ready = tmp_path / "ready"
    program = f"""
        import signal, time, os
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open({str(ready)!r}, 'w').write(str(os.getpid()))
        time.sleep(60)
    """
    supervisor = supervise(program, tmp_path, engine_stop_sec=1000 if is_killed else 0.3)
    async with running(supervisor):
        await until(lambda: ready.exists() and ready.read_text() != "")
        started = time.monotonic()
        if is_killed:
            asyncio.get_running_loop().call_later(0.3, supervisor.kill)
    assert time.monotonic() - started < 50  # the child would sleep for 60 s
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


HANG_SECONDS = 3
HANGS = """
    import faulthandler, json, sqlite3, time
    from datetime import datetime, timezone

    faulthandler.enable()
    database = sqlite3.connect({database!r}, timeout=60)

    def report(stalled):
        now = datetime.now(timezone.utc).replace(tzinfo=None).isoformat(" ")
        with database:
            status = json.dumps({{"seconds without progress": stalled}})
            database.execute("UPDATE engine_state SET last_seen_at = ?, status = ?", (now, status))

    def hang():
        while True:
            {action}
            time.sleep(0.05)

    hang()
"""


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("report(stalled=9)", "it has made no progress for 9 s"),
        ("pass", "it has not reported for 3 s"),
        ("report(stalled=0)", None),
    ],
)
async def test_a_hung_engine_is_restarted(
    action: str, reason: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """It shows where it hangs. An engine that compiles for hours reports progress."""
    program = HANGS.format(database=str(tmp_path / "tinker.db"), action=action)
    supervisor = supervise(program, tmp_path, engine_hang_sec=HANG_SECONDS)
    service = Service(supervisor._config, supervisor)
    add_rows(service.database, EngineState(**(STATE | {"base_model": "org/m", "status": {STALLED: 99}})))
    async with service.running():
        if reason is None:
            await until(lambda: supervisor.is_running)
            await asyncio.sleep(1.7 * HANG_SECONDS)
        else:
            await until(lambda: supervisor.n_starts > 1)
    assert (supervisor.n_starts > 1) == (reason is not None)
    assert reason is None or reason in caplog.text
    assert ("in hang" in capfd.readouterr().err) == (reason is not None)
