"""Reader of `metrics.jsonl`: one JSON object per line, `{"step": 3, "reward/avg_raw_reward": 0.5, …}`.

NaN and infinite numbers are `null` in the file and `None` here.
"""

import json
from pathlib import Path
from typing import Any

from skyrl_report.errors import DataError


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file in the order they were logged, or [] if the file does not exist.

    A truncated last line is ignored. Raise DataError if any other line is not a JSON object with a step.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if (row := parse_row(line)) is not None:
            rows.append(row)
        elif number < len(lines):  # nothing, or a truncated line, may follow the last newline
            raise DataError(
                f"{path}:{number} is not a JSON object with an integer 'step': {line[:80]!r}; remove that line to read "
                "the rest"
            )
    return rows


def parse_row(line: str) -> dict[str, Any] | None:
    """Return a line of the file, or None if it is truncated or has no step."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
