"""`metrics.jsonl`: one JSON object per line, `{"step": 3, "reward/avg_raw_reward": 0.5, …}`.

NaN and infinite numbers are written as `null`, because JSON has neither, so readers see `None`. A process that is
killed while it writes leaves a truncated last line, which is dropped when the file is next opened or read.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_report.metrics_file import parse_row, read_metrics
from skyrl_train.checkpoint import replace_text


class MetricsFile:
    """An append-only metrics file. Each line has reached the operating system when `log` returns.

    If the disk is full or broken, `log` raises OSError and keeps the line, to write it with the next one.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        assert "step" not in metrics, "the step is a separate argument"
        row: dict[str, float | None] = {"step": step}
        for name, value in metrics.items():  # Python, NumPy and one-element torch numbers
            number = value if isinstance(value, int) else float(value)
            row[name] = number if math.isfinite(number) else None
        self._unwritten += _line(row).encode()
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            n_written = self._file.write(self._unwritten)
            self._unwritten = self._unwritten[n_written:]

    def truncate_after(self, step: int) -> None:
        """Move the lines after `step` to `metrics.superseded.jsonl`. A run resumed at `step` logs these steps again."""
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) == len(rows):
            return
        with self.path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as superseded:
            superseded.write("".join(_line(row) for row in rows if row["step"] > step))
        self._file.close()
        replace_text(self.path, "".join(map(_line, kept)))
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        try:
            if not self._file.closed:
                self._write()
        finally:
            self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _drop_torn_line(path: Path) -> None:
    """Make the file end with a newline: terminate a complete last line, and drop a truncated one."""
    content = path.read_bytes() if path.exists() else b""
    if not content or content.endswith(b"\n"):
        return
    start = content.rfind(b"\n") + 1
    if parse_row(content[start:].decode(errors="replace")) is None:
        os.truncate(path, start)
    else:
        with path.open("ab") as file:
            file.write(b"\n")
