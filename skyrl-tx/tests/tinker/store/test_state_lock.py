"""One server and one engine own the state, on both databases."""

import errno
import fcntl
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from tx_kit.processes import start_python

from tx.tinker.config import TxConfig, arguments_of
from tx.tinker.store.state_lock import StateLock, StateTakenError


@pytest.fixture
def config(each_database_url: str, tmp_path: Path) -> TxConfig:
    return TxConfig(base_model="org/none", checkpoints_base=tmp_path / "state", database_url=each_database_url)


on_sqlite = pytest.mark.parametrize("each_database_url", ["sqlite"], indirect=True)


def start(config: TxConfig, *program: str) -> subprocess.Popen[str]:
    flags = [*arguments_of(config), f"--database-url={config.database_url}"]
    return start_python(*program, *flags, stderr=subprocess.PIPE)


def test_only_one_engine_holds_it(config: TxConfig, tmp_path: Path) -> None:
    with StateLock(config, "engine") as first:
        first.take()
        assert first.is_held()
        elsewhere = config.model_copy(update={"checkpoints_base": tmp_path / "other"})
        for other in (config, elsewhere):
            with (
                StateLock(other, "engine") as second,
                pytest.raises(StateTakenError, match=r"another engine, process \d+ on .* since"),
            ):
                second.take()
        with StateLock(config, "server") as server:
            server.take()
    with StateLock(config, "engine") as next_one:
        next_one.take()


@on_sqlite
def test_a_folder_has_one_database(config: TxConfig, tmp_path: Path) -> None:
    other = config.model_copy(update={"database_url": f"sqlite:///{tmp_path}/other.db"})
    with StateLock(config, "engine") as first, StateLock(other, "engine") as second:
        first.take()
        with pytest.raises(StateTakenError, match=r"state/engine.lock is in use by another engine"):
            second.take()


def test_a_kill_releases_it(config: TxConfig, caplog: pytest.LogCaptureFixture) -> None:
    program = (
        "import os, sys, time\nfrom tx.tinker.config import parse_config\n"
        "from tx.tinker.store.state_lock import StateLock\n"
        "lock = StateLock(parse_config(sys.argv[1:], program='test'), 'engine')\n"
        "lock.take(); print('taken by', os.getpid(), file=sys.stderr, flush=True); time.sleep(60)\n"
    )
    holder = start(config, "-c", program)
    assert holder.stderr is not None
    words, _, pid = holder.stderr.readline().rpartition(" ")
    assert words == "taken by"
    with holder.stderr, StateLock(config, "engine") as lock:
        threading.Timer(0.5, holder.send_signal, (signal.SIGKILL,)).start()
        pause = threading.Event()
        lock.wait(60, lambda: pause.wait(0.05))
        assert holder.wait(20) == -signal.SIGKILL
    (waited,) = [one.getMessage() for one in caplog.records if one.name == "tx.tinker.store.state_lock"]
    assert f"another engine, process {int(pid)} on" in waited


@on_sqlite
def test_a_file_system_without_locks(
    config: TxConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with StateLock(config, "engine") as lock:
        lock.take()
    assert re.search(r"cannot lock .*engine\.lock", caplog.text)


def test_waiting_times_out(config: TxConfig) -> None:
    with StateLock(config, "engine") as first, StateLock(config, "engine") as second:
        first.take()
        for seconds, should_end in ((0.1, False), (60, True)):
            with pytest.raises(StateTakenError):
                second.wait(seconds, lambda should_end=should_end: should_end)  # type: ignore[misc]


@pytest.mark.parametrize("each_database_url", ["postgresql"], indirect=True)
def test_a_lost_connection(config: TxConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tx.tinker.store.state_lock.CHECK_INTERVAL_SEC", 0.0)
    with StateLock(config, "engine") as lock:
        lock.take()
        assert lock.is_held()
        assert lock._connection is not None
        lock._connection.connection.dbapi_connection.close()  # type: ignore[union-attr]
        assert not lock.is_held()


@on_sqlite
def test_a_second_server_names_the_holder_and_exits(config: TxConfig) -> None:
    with StateLock(config, "server") as lock:
        lock.take()
        second = start(config, "-m", "tx.run.main", "serve")
        _, output = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "server.lock is in use by another server, process" in output
    assert "; stop it, or use another --checkpoints-base" in output


@on_sqlite
def test_a_second_engine_waits_and_logs_it(config: TxConfig) -> None:
    with StateLock(config, "engine") as lock:
        lock.take()
        second = start(config, "-m", "tx.tinker.engine")
        assert second.stderr is not None
        with second.stderr:
            while "Waiting up to 300 s for it to exit" not in second.stderr.readline():
                assert second.poll() is None
            second.send_signal(signal.SIGTERM)
            assert "engine.lock is in use by another engine, process" in second.stderr.read()
        assert second.wait(60) == 1
