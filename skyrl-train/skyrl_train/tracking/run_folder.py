"""Creation of the run folder, and its `train.log`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from skyrl_report.run_folder import RunFolder
from skyrl_train.checkpoint import make_folder
from skyrl_train.errors import ConfigError
from skyrl_train.tracking.writer import BackgroundWriter

logger = logging.getLogger(__name__)


def create_run_folder(output_dir: Path | str, project: str, run: str) -> RunFolder:
    """Create `output_dir/project/run` if it is missing. ConfigError if it is not inside `output_dir`."""
    root = Path(output_dir).expanduser().resolve()
    path = (root / project / run).resolve()
    if not project or not run or root not in path.parents:
        raise ConfigError(
            f"trainer.project_name={project!r} and trainer.run_name={run!r} must name a folder inside {root}; "
            "use plain names such as 'catch' and 'shaped'"
        )
    make_folder(path)
    return RunFolder(path)


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Append the project's log messages (INFO and above) to `path` within the context."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(path)
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in ("skyrl_train", "skyrl_report", "skyrl_gym", "skyrl_agent")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    try:
        yield
    finally:
        for logger, old_level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(old_level)
        handler.close()


class _LogFile(logging.FileHandler):
    """A log file, written in the background. Warns once if a message cannot be written, e.g. to a full disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self._writer = BackgroundWriter("train.log")
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.submit(partial(self._write, self.format(record) + self.terminator))
        except OSError as error:
            self._warn(error)
        except Exception:  # noqa: BLE001, a message that cannot be formatted: `handleError` prints the error
            self.handleError(record)

    def _write(self, text: str) -> None:
        assert self.stream is not None, "the file is open until `close`"
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        for close in (self._writer.close, super().close):
            try:
                close()
            except OSError as error:
                self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("%s lacks the last messages: %s", self.baseFilename, error)
