"""Keep `report.html` of a run in progress fresh, at little cost.

`python -m skyrl_report.refresh RUN COMMAND` writes the page once, at the lowest priority, and prints the processor
seconds that it took. The next one follows when these seconds are 1% of the time since then, so the page of a short run
is fresh to the minute, and a page that takes 10 s is written every 17 minutes.
"""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from skyrl_report.run_folder import RunFolder

logger = logging.getLogger(__name__)

MAX_SHARE = 0.01
"""Maximum processor time of pages, as a share of the run's time."""

FIRST_COST_S = 0.5
"""Assumed processor time of the first page."""


class Refresher:
    """Writes the report of a run in other processes, one at a time."""

    def __init__(self, folder: RunFolder, command: str) -> None:
        self._arguments = [sys.executable, "-m", "skyrl_report.refresh", str(folder.path), command]
        self._process: subprocess.Popen[str] | None = None
        self._due_at = time.monotonic() + FIRST_COST_S / MAX_SHARE

    def poll(self) -> None:
        """Start a process if a page is due. Never waits. A failure is logged, and ends the refreshing."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            output, errors = self._process.communicate()
            if self._process.returncode:
                logger.warning("The report is only written at the end of the run: %s", errors.strip()[-1000:])
                self._due_at = float("inf")
            else:
                self._due_at = time.monotonic() + float(output) / MAX_SHARE
            self._process = None
        if time.monotonic() >= self._due_at:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._arguments, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
            )

    def close(self) -> None:
        """End the process in progress."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main() -> None:
    """Write the report of the run in the first argument. The second is the run's command."""
    from skyrl_report.browser import write_browser
    from skyrl_report.page import write_report

    os.nice(19)
    path, command = sys.argv[1:]
    folder = RunFolder(Path(path))
    write_browser(folder)
    write_report(folder, command=command)
    sys.stdout.write(str(time.process_time()))


if __name__ == "__main__":
    main()
