"""The state of a run, for people who watch it: progress, time left, the latest numbers, warnings."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_report.diagnosis import Finding, diagnose, read_findings
from skyrl_report.evaluations import EvaluatedTrajectory, parse_trajectory
from skyrl_report.run_folder import AGGREGATED, RunFolder, Session
from skyrl_report.series import MetricRows, Series, read_series
from skyrl_report.summary import TimeShare, format_duration, headline_evals, time_split

N_RECENT = 20
"""Steps from which the speed and the time by stage are computed."""

N_WARNINGS = 3
TAIL_BYTES = 200_000
LOG_WARNING = re.compile(r"^(\S+ \S+) (?:WARNING|ERROR) \S+: (.*)$")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run at one moment."""

    session: Session | None
    step: int | None
    """Last logged step, or None before the first."""
    silence_s: float | None
    """Seconds since the last step was logged."""
    step_s: float | None
    """Median time between steps, evaluations included."""
    curves: tuple[Series, ...]
    """Training reward or loss, then the headline evaluations."""
    latest: Mapping[str, float]
    """The latest value of each metric."""
    times: tuple[TimeShare, ...]
    warnings: tuple[str, ...]
    sample: EvaluatedTrajectory | None

    @property
    def total_steps(self) -> int | None:
        return None if self.session is None else self.session.total_steps

    @property
    def remaining_s(self) -> float | None:
        """Expected seconds until the last step. None for a run that has ended, or whose speed is unknown."""
        if self.session is None or not self.session.is_alive or self.step is None or self.step_s is None:
            return None
        left = (self.session.total_steps - self.step) * self.step_s - min(self.silence_s or 0.0, self.step_s)
        return max(left, 0.0)

    @property
    def state(self) -> str:
        """One phrase: "running", "finished", "stopped at step 12", "failed: …", "killed" or "state unknown"."""
        session = self.session
        if session is None:
            return "state unknown"
        if session.error is not None:
            return f"failed: {session.error}"
        if session.ended_at is not None:
            is_complete = self.step is not None and self.step >= session.total_steps
            return "finished" if is_complete else f"stopped at step {self.step or 0}"
        if not session.is_alive:
            return "killed: its process is gone"
        late = self.silence_s is not None and self.step_s is not None and self.silence_s > max(60.0, 5 * self.step_s)
        return f"running, but silent for {format_duration(self.silence_s or 0.0)}" if late else "running"

    @property
    def progress(self) -> str:
        """Steps, state and time left, e.g. "step 12 of 60 · running · 3 min 05 s left"."""
        steps = f"step {self.step or 0}" + (f" of {self.total_steps}" if self.total_steps else "")
        left = [] if self.remaining_s is None else [f"{format_duration(self.remaining_s)} left"]
        return " · ".join([steps, self.state, *left])


def read_status(folder: RunFolder, rows: MetricRows, now: float | None = None) -> RunStatus:
    """Return the state of a run whose metrics are `rows`. `now` defaults to the current time."""
    now = time.time() if now is None else now
    session = folder.read_session()
    recent = rows[-N_RECENT:]
    latest = {name: value for row in rows for name, value in row.items() if value is not None}
    names = [name for name in ("reward/avg_raw_reward", "train/loss") if name in latest]
    silence = now - folder.metrics.stat().st_mtime if folder.metrics.exists() else None
    findings = find_problems(folder, rows)
    waits = _read_waits(folder.waits, now) if session is not None and session.is_alive else ()
    return RunStatus(
        session=session,
        step=rows[-1]["step"] if rows else None,
        silence_s=silence,
        step_s=_step_seconds(recent),
        curves=tuple(filter(None, [*(read_series(rows, name) for name in names), *headline_evals(rows)])),
        latest=latest,
        times=tuple(time_split(recent)),
        warnings=(
            *waits,
            *(f"step {finding.step}: {finding.text}" for finding in findings),
            *_last_warnings(folder.train_log, [finding.text for finding in findings]),
        ),
        sample=_last_sample(folder),
    )


def find_problems(folder: RunFolder, rows: MetricRows) -> list[Finding]:
    """Return what the run's diagnosis found. A run without a diagnosis, such as an old one, is diagnosed now."""
    return read_findings(folder.findings) if folder.findings.exists() else diagnose(rows, folder.read_config()[1])


def _read_waits(file: Path, now: float) -> Iterator[str]:
    """Yield a line for each stage in which something waits for long. The file may be gone or incomplete."""
    try:
        stages = json.loads(file.read_text("utf-8"))["waits"]
        for stage in stages:
            oldest = stage["oldest"]
            duration = format_duration(now - oldest["since"])
            detail = f" ({oldest['detail']})" if oldest["detail"] else ""
            yield f"{stage['count']} waiting: {stage['stage']}, the longest for {duration}: {oldest['who']}{detail}"
    except (OSError, ValueError, KeyError, TypeError):
        return


def _step_seconds(rows: MetricRows) -> float | None:
    """Return the median step plus the mean time of what runs between steps."""
    if not (steps := [row["timing/step"] for row in rows if row.get("timing/step")]):
        return None
    between = sum(row.get("timing/eval") or 0.0 for row in rows if row["step"] > 0)
    return statistics.median(steps) + between / len(steps)


def _last_warnings(log: Path, known: Sequence[str]) -> Iterator[str]:
    """Return the last warnings of the log, except known ones."""
    lines = _tail(log).splitlines()
    found = [match for line in lines if (match := LOG_WARNING.match(line)) and match[2] not in known]
    return (f"{match[1].partition(',')[0]} {match[2]}" for match in found[-N_WARNINGS:])


def _last_sample(folder: RunFolder) -> EvaluatedTrajectory | None:
    """Return the last trajectory of the newest file of trajectories."""
    files = [folder.trajectories(step) for step in folder.trajectory_steps()[-2:]]
    for evaluation in [None, *folder.eval_steps()[-2:]]:
        files += [path for path in folder.evals(evaluation).glob("*.jsonl") if path.name != AGGREGATED]
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        for line in reversed(_tail(path).splitlines()):
            if (row := _parse(line)) is not None:
                return parse_trajectory(row)
    return None


def _parse(line: str) -> dict[str, Any] | None:
    """Return a line as a row, or None if it is incomplete or longer than the tail."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def _tail(path: Path) -> str:
    """Return the end of a file that may not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", errors="replace")  # a device has no end
    except FileNotFoundError:
        return ""
