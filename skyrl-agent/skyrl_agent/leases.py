"""Leases of workspaces. The next process to start removes the workspaces of killed processes.

A lease is a locked file. The kernel releases the lock when its process dies, so an unlocked file means that the
owner is dead. The file records the command that removes the container, if any.
"""

import fcntl
import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from skyrl_gym.isolation.files import clear_folder
from skyrl_gym.isolation.processes import all_processes, is_running

logger = logging.getLogger(__name__)

MARK = "SKYRL_WORKSPACE"
"""Environment variable of a workspace's processes, which children inherit."""

CLOSE_TIMEOUT_S = 60.0
_swept: set[Path] = set()
_sweeping = threading.Lock()


def lease_folder() -> Path:
    """Return the folder of this user's leases."""
    return Path(tempfile.gettempdir()).resolve() / f"skyrl-workspaces-{os.getuid()}"


class Lease:
    """A temporary folder with its processes and container. Another process removes them if this one dies."""

    def __init__(self, name: str, close: Sequence[str] = ()) -> None:
        """Create the lease `name`. `close` is a command that removes what is outside the folder, e.g. `docker rm`.

        The first lease of a process removes the leases of dead processes.
        """
        root = lease_folder()
        root.mkdir(mode=0o700, exist_ok=True)
        if (owner := root.stat().st_uid) != os.getuid():
            raise PermissionError(f"{root} belongs to user {owner}; set TMPDIR to a folder of your own")
        with _sweeping:
            if root not in _swept:
                _swept.add(root)
                remove_abandoned()
        self._file, self._name, self._close = root / f"{name}.lease", name, list(close)
        self.folder = root / name
        new = root / f"{name}.new"
        self._fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps({"close": self._close}).encode())
        new.rename(self._file)  # visible only when it is locked
        self.folder.mkdir(mode=0o700)

    def release(self) -> None:
        """Kill the processes with this mark, run `close`, and remove the folder."""
        if self._fd >= 0:
            _clean_up(self._file, self._close)
            os.close(self._fd)
            self._fd = -1


def new_name() -> str:
    """Return a name for a lease. It is also the mark of its processes."""
    return uuid.uuid4().hex[:16]


def remove_abandoned() -> int:
    """Remove the leases of dead processes. Return their number."""
    n_removed = 0
    for file in lease_folder().glob("*.lease"):
        with suppress(FileNotFoundError):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with os.fdopen(os.dup(fd), encoding="utf-8") as opened:
                    close = json.load(opened)["close"]
                _clean_up(file, close)
                n_removed += 1
            except BlockingIOError:  # its owner is alive
                pass
            finally:
                os.close(fd)
    if n_removed:
        logger.warning("Removed %d workspaces of runs that were killed", n_removed)
    return n_removed


def kill_marked(name: str) -> None:
    """Kill the process groups of processes with this mark, repeatedly, until there are none."""
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while (found := [pid for pid in _find_marked(name) if is_running(pid)]) and time.monotonic() < deadline:
        for pid in found:
            with suppress(ProcessLookupError):
                os.killpg(os.getpgid(pid), signal.SIGKILL)
        time.sleep(0.01)


def _clean_up(file: Path, close: Sequence[str]) -> None:
    name = file.stem
    kill_marked(name)
    if close:
        try:
            subprocess.run(close, capture_output=True, timeout=CLOSE_TIMEOUT_S, check=False)
        except (subprocess.SubprocessError, OSError) as error:
            logger.warning("%s failed (%s); its container may remain", " ".join(close), error)
    if (folder := file.with_suffix("")).is_dir():
        clear_folder(str(folder))
        folder.rmdir()
    file.unlink(missing_ok=True)


def _find_marked(name: str) -> Iterator[int]:
    variable = f"{MARK}={name}".encode()
    for pid in all_processes():
        with suppress(OSError):
            if variable in Path(f"/proc/{pid}/environ").read_bytes():
                yield pid
