"""Upload folders in a background thread."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from skyrl_train.checkpoint.remote import STORAGE_ERRORS
from skyrl_train.errors import CheckpointError

MAX_BACKOFF_S = 30.0
"""Maximum number of seconds between two attempts."""


@dataclass(slots=True)
class Upload:
    """A folder to upload."""

    source: Path
    priority: int  # higher priorities come first
    send: Callable[[], int]
    """Function that uploads the folder and returns the number of sent bytes."""
    step: int | None = None  # step of a checkpoint
    n_failures: int = 0


@dataclass(frozen=True, slots=True)
class UploadResult:
    """Result of one attempt. `error` is None if it succeeded."""

    upload: Upload
    seconds: float
    n_bytes: int = 0
    error: str | None = None
    is_final: bool = True


@dataclass(slots=True)
class Uploader:
    """A background thread that uploads one folder at a time, with retries until it succeeds.

    The thread is a daemon, so a hanging upload does not keep the process alive.
    """

    _pending: list[Upload] = field(default_factory=list)
    _results: list[UploadResult] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _is_closed: bool = False

    def submit(self, upload: Upload) -> None:
        """Upload a folder once no waiting upload is more urgent. A waiting upload of the same folder is replaced."""
        with self._changed:
            self._pending = [waiting for waiting in self._pending if waiting.source != upload.source]
            self._pending.append(upload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def n_pending(self) -> int:
        """Number of folders that are not uploaded yet."""
        with self._changed:
            return len(self._pending)

    def take_results(self) -> list[UploadResult]:
        """Return the attempts that ended since the last call."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything is uploaded. Return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self) -> None:
        """End the thread after the upload in progress. Does not wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if self._is_closed:
                    return
                upload = min(self._pending, key=lambda waiting: (waiting.n_failures, -waiting.priority))
            result = _attempt(upload)
            with self._changed:
                self._results.append(result)
                if result.is_final:
                    self._pending = [waiting for waiting in self._pending if waiting is not upload]
                    self._changed.notify_all()
                else:
                    upload.n_failures += 1
                    backoff_s = min(MAX_BACKOFF_S, 2.0 ** (upload.n_failures - 1))
                    self._changed.wait_for(lambda: self._is_closed, backoff_s)


def _attempt(upload: Upload) -> UploadResult:
    started = time.monotonic()
    try:
        n_bytes, error, is_final = upload.send(), None, True
    except CheckpointError as failure:
        n_bytes, error, is_final = 0, str(failure), True
    except STORAGE_ERRORS as failure:
        n_bytes, error, is_final = 0, f"{type(failure).__name__}: {failure}", False
        if not upload.source.exists():
            error, is_final = f"{upload.source} was removed before it was uploaded", True
    return UploadResult(upload, time.monotonic() - started, n_bytes, error, is_final)
