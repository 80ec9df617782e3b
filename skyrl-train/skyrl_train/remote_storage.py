"""Background upload of a run's checkpoints and evaluation trajectories."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from skyrl_report.remote import STORAGE_ERRORS, RemoteFolder
from skyrl_report.run_folder import IMAGE_FOLDER, RunFolder
from skyrl_train.checkpoint import RemoteCheckpoints, open_folder, step_of, upload_files
from skyrl_train.errors import CheckpointError
from skyrl_train.run import Callback, Run, StepReport
from skyrl_train.watchdog import UPLOAD, Wait

logger = logging.getLogger(__name__)

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
            error, is_final = "it was removed from this machine before it was uploaded", True
    return UploadResult(upload, time.monotonic() - started, n_bytes, error, is_final)


class RemoteStorage(Callback):
    """A callback that uploads checkpoints and evaluation trajectories in the background.

    An uploaded checkpoint is removed from this machine, unless it is among the `trainer.max_ckpts_to_keep` latest or
    the run would resume from it. At its end, the run waits up to `trainer.remote_exit_timeout_seconds` for uploads.
    """

    def __init__(self, run_folder: RunFolder, trajectory_url: str | None = None) -> None:
        """Create the callback. It uploads evaluations to `trajectory_url`, or only checkpoints if that is None."""
        self._run_folder = run_folder
        self._uploader = Uploader()
        self._newest_step = -1  # of this run's checkpoints
        self._failing: set[Path] = set()
        self._trajectory_url = trajectory_url
        self._trajectories: RemoteFolder | None = None

    async def on_train_start(self, run: Run) -> None:
        """Upload files that an earlier process of this run left."""
        self._trajectories = open_evaluations(self._trajectory_url, run.cfg.trainer.run_name)
        for step in self._run_folder.eval_steps():
            if step <= run.global_step:
                self._upload_evaluation(step)
        if run.remote is None:
            return
        self._newest_step = run.global_step
        self._uploader.submit(
            Upload(run.checkpoints.path, sys.maxsize, partial(_ignore_later, run.remote, run.global_step))
        )
        for step in run.checkpoints.steps():
            if step <= run.global_step:
                self._upload_checkpoint(run, run.checkpoints.path / f"global_step_{step}", step)

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.global_step in self._run_folder.eval_steps():
            self._upload_evaluation(report.global_step)
        await self._settle(run)

    async def on_checkpoint(self, run: Run, path: Path) -> None:
        if run.remote is not None:
            self._newest_step = step_of(path)
            self._upload_checkpoint(run, path, self._newest_step)
            await self._settle(run)

    async def on_train_end(self, run: Run, error: BaseException | None) -> None:
        is_interrupt = error is not None and not isinstance(error, Exception)  # the user does not want to wait
        timeout_s = 0.0 if is_interrupt else run.cfg.trainer.remote_exit_timeout_seconds
        if n_pending := self._uploader.n_pending:
            logger.info("Waiting up to %.0f s for %d uploads", timeout_s, n_pending)
        with Wait(UPLOAD, f"{n_pending} folders", limit_s=timeout_s):
            is_done = await asyncio.to_thread(self._uploader.wait, timeout_s)
        await self._settle(run)
        self._uploader.close()
        if not is_done:
            await run.alert(
                f"{self._uploader.n_pending} uploads are not complete; the files stay on this machine, and the same "
                "command uploads the rest"
            )

    def _upload_checkpoint(self, run: Run, path: Path, step: int) -> None:
        assert run.remote is not None
        remote = run.remote

        def send() -> int:
            n_bytes = remote.upload(path)
            if step >= self._newest_step:
                remote.point_to(step)
            return n_bytes

        run.checkpoints.pinned.add(step)
        self._uploader.submit(Upload(path, step, send, step))

    def _upload_evaluation(self, step: int) -> None:
        if self._trajectories is not None:
            folder = self._run_folder.evals(step)
            self._uploader.submit(Upload(folder, -1, partial(upload_evaluation, folder, self._trajectories)))

    async def _settle(self, run: Run) -> None:
        """Report finished uploads, and remove local checkpoints that are uploaded and superseded."""
        if run.remote is None and self._trajectories is None:
            return
        gauges = run.gauges
        for result in self._uploader.take_results():
            upload = result.upload
            if result.error is None:
                self._failing.discard(upload.source)
                gauges["storage/uploaded_bytes"] = gauges.get("storage/uploaded_bytes", 0.0) + result.n_bytes
                gauges["storage/upload_seconds"] = result.seconds
                if upload.step is not None:
                    gauges["storage/uploaded_step"] = float(max(upload.step, gauges.get("storage/uploaded_step", 0)))
                    logger.info("The checkpoint of step %d is in remote storage", upload.step)
            elif upload.source not in self._failing:  # one alert for each folder
                self._failing.add(upload.source)
                retries = "the upload is not retried" if result.is_final else "training continues, and it is retried"
                await run.alert(f"{upload.source} could not be uploaded: {result.error}; {retries}")
            if result.is_final and upload.step is not None and result.error is None:
                run.checkpoints.pinned.discard(upload.step)
        gauges["storage/pending_uploads"] = float(self._uploader.n_pending)
        if run.remote is not None:
            try:
                await asyncio.to_thread(run.checkpoints.remove_superseded)
            except OSError as error:
                await run.alert(f"an uploaded checkpoint could not be removed: {error}")


def open_evaluations(url: str | None, run_name: str) -> RemoteFolder | None:
    """Return the folder of a run's evaluations under `url`. Without credentials, log a warning and return None."""
    folder = open_folder(url, "trainer.remote_trajectory_url", "trajectories")
    return None if folder is None else folder / "evals" / run_name


def upload_evaluation(folder: Path, target: RemoteFolder) -> int:
    """Upload an evaluation into `target`, after the images that it shows. Return the number of uploaded bytes."""
    images = folder.parent / IMAGE_FOLDER
    n_bytes = upload_files(images, target / IMAGE_FOLDER) if images.exists() else 0
    return n_bytes + upload_files(folder, target / folder.name)


def _ignore_later(remote: RemoteCheckpoints, step: int) -> int:
    """Point remote storage to `step`, where the run starts, so that a resume ignores later checkpoints."""
    if any(later > step for later in remote.steps()):
        remote.point_to(step)
    return 0
