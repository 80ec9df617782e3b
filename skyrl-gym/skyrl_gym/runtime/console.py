"""A guarded console: if standard output or errors go away, only printed output is lost."""

import errno
import io
import logging
import os
import sys
from typing import Any

logger = logging.getLogger("skyrl_gym")


def guard_console() -> None:
    """Make `print`, progress bars and logging drop output that the console rejects.

    A closed terminal, a pipe whose reader has ended or a full disk behind `> log` would otherwise raise an OSError in
    whatever prints next: the training loop, an environment or a reward function. A stream that is closed from the
    start, or replaced as in notebooks, is not guarded. Printing to a closed stream does nothing.
    """
    for name, original in (("stdout", sys.__stdout__), ("stderr", sys.__stderr__)):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, for the rest of the program
        elif stream is original and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _guarded(stream))


def _guarded(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    raw = _Console(stream.fileno(), "wb", closefd=False)
    try:
        stream.flush()
    except OSError as error:
        raw.report(error)
    buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer, stream.encoding, stream.errors, None, stream.line_buffering, write_through=stream.write_through
    )


class _Console(io.FileIO):
    """A file descriptor that accepts all bytes, and drops those it cannot write."""

    _is_reported = False

    def write(self, data: Any) -> int:
        n_bytes = memoryview(data).nbytes
        try:
            n_written = super().write(data)
            if n_written is not None:
                return n_written
            error: OSError = BlockingIOError(errno.EAGAIN, "it is full, and does not block")
        except OSError as refused:
            error = refused
        self.report(error)
        return n_bytes

    def report(self, error: OSError) -> None:
        """Log the first loss to the run's files. The console's own handler would write to this stream again."""
        if not self._is_reported:
            self._is_reported = True
            stream = "output" if self.fileno() == 1 else "error"
            text = f"Failed to write to standard {stream}: {error}. The run continues, but output printed there is lost"
            record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, text, (), None)
            for handler in logger.handlers:
                handler.handle(record)
