"""One metric over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

MetricRows = Sequence[Mapping[str, Any]]
"""Rows from `read_metrics`, e.g. `{"step": 3, "reward/avg_raw_reward": 0.5, …}`."""


@dataclass(frozen=True)
class Series:
    """A metric over steps: `values[i]` at `steps[i]`. Steps ascend. None stands for a NaN or infinite value."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    def __bool__(self) -> bool:
        return bool(self.finite)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def n_not_finite(self) -> int:
        return len(self.values) - len(self.finite)

    @property
    def first(self) -> float:
        return self.finite[0]

    @property
    def last(self) -> float:
        return self.finite[-1]

    def runs(self) -> list[list[tuple[int, float]]]:
        """Split the points into stretches without gaps, for drawing."""
        stretches = groupby(zip(self.steps, self.values, strict=True), key=lambda point: point[1] is not None)
        return [[(step, float(value or 0)) for step, value in points] for is_finite, points in stretches if is_finite]

    def smoothed(self) -> Series:
        """Return a moving average over a centered window of a tenth of the points. Short series are unchanged."""
        window = np.ones(2 * (len(self.values) // 20) + 1)
        sums = np.convolve([value or 0.0 for value in self.values], window, "same")
        counts = np.convolve([value is not None for value in self.values], window, "same")
        means = (sums / np.maximum(counts, 1)).tolist()
        return Series(
            self.name,
            self.steps,
            tuple(None if value is None else mean for value, mean in zip(self.values, means, strict=True)),
        )


def read_series(rows: MetricRows, name: str) -> Series:
    """Return the series of metric `name`. If a step logged it twice, the latest value counts."""
    points = {row["step"]: row[name] for row in rows if name in row}
    steps = tuple(sorted(points))
    return Series(name, steps, tuple(points[step] for step in steps))


def distinct(curves: Iterable[Series]) -> list[Series]:
    """Drop empty series and series that repeat an earlier one under a different prefix.

    With a single environment or data source, the same values are logged under its own and under the common prefix.
    """
    kept: dict[tuple[object, ...], Series] = {}
    for curve in curves:
        if curve:
            kept.setdefault((format_name(curve.name), curve.steps, curve.values), curve)
    return list(kept.values())


def metric_names(rows: MetricRows) -> list[str]:
    """Return the names of all metrics of a run, sorted."""
    return sorted({name for row in rows for name in row} - {"step"})


def is_share(name: str) -> bool:
    """Return True for a share between 0 and 1, shown as a percentage, e.g. `eval/environment/catch_rate`."""
    last = name.rpartition("/")[2]
    return last.endswith("_rate") or "pass_at_" in last or last == "accuracy"


def format_value(name: str, value: float, *, digits: int = 3) -> str:
    """Format a number for display: `97.5%` for a share, else e.g. `0.0213`, `4,338` or `2.5e-4`."""
    if is_share(name):
        return f"{value:.1%}".replace(".0%", "%")
    if abs(value) >= 1000:
        n_decimals = max(digits - len(f"{abs(value):.0f}"), 0)
        return f"{value:,.{n_decimals}f}"
    text = f"{value:.{digits}g}"
    if 0 < abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return text


def format_name(name: str) -> str:
    """Return a readable name: `average score` for `eval/all/avg_score`."""
    return name.rpartition("/")[2].replace("avg_", "average_").replace("_", " ")
