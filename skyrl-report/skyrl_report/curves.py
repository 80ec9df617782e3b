"""Data of the interactive curves, as JSON in a page.

The script `curves.js` replaces the static charts with charts of uPlot (version 1.6.32, MIT license, in
`templates/uplot-1.6.32`). Readers without JavaScript see the static ones.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from markupsafe import Markup

from skyrl_report.series import MetricRows, Series, is_share, metric_names, read_series
from skyrl_report.settings import leaves

MAX_POINTS = 1500
"""Maximum number of points of a curve in a page."""

SEED_KEYS = re.compile(r"(^|[._])(seed|run_name|project_name|ckpt_path|export_path|\w+_dir)$")
"""Settings in which runs of one group may differ."""

SEED_NAMES = re.compile(r"[\w./-]*/|[-_.]?seed[-_=]?\d+")
"""Parts of other settings in which they may differ: the folder of a path, and seeds in names."""


class CurveRun(NamedTuple):
    """A run on the page. Runs of one `group` are repetitions with other seeds."""

    name: str
    group: str
    style: str
    rows: MetricRows


def encode_curves(runs: Sequence[CurveRun]) -> Markup:
    """Return the curves of all metrics as JSON that is safe in a `<script>` element.

    `x` lists distinct sequences of steps, and a series refers to its steps by number. `time` and `tokens` are the
    seconds and the tokens up to each of `steps`.
    """
    content = [
        {"name": run.name, "group": run.group, "style": run.style, **_axes(run.rows), **_series(run.rows)}
        for run in runs
    ]
    text = json.dumps({"runs": content}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c"))


def group_key(config: Mapping[str, Any]) -> str:
    """Return a text that is equal for runs whose settings differ only in seeds, names and folders."""
    values = dict(leaf for section, settings in config.items() for leaf in leaves(settings, section))
    return "\n".join(
        f"{key}: {SEED_NAMES.sub('', str(value))}" for key, value in values.items() if not SEED_KEYS.search(key)
    )


def _series(rows: MetricRows) -> dict[str, Any]:
    xs: dict[tuple[int, ...], int] = {}
    series = {}
    for name in metric_names(rows):
        if curve := thin(read_series(rows, name)):
            number = xs.setdefault(curve.steps, len(xs))
            values = [None if value is None else float(f"{value:.6g}") for value in curve.values]
            series[name] = [number, values, int(is_share(name))]
    return {"x": list(xs), "series": series}


def _axes(rows: MetricRows) -> dict[str, list[float]]:
    """Return the steps with the seconds and the tokens up to each."""
    latest = {row["step"]: row for row in rows}
    steps = sorted(latest)
    seconds, tokens = [], []
    for step in steps:
        step_s = latest[step].get("timing/step") or 0.0
        seconds.append(step_s + (latest[step].get("timing/eval") or 0.0))
        tokens.append(step_s * (latest[step].get("trainer/tokens_per_second") or 0.0))
    if len(steps) > MAX_POINTS:  # interpolated between these
        kept = sorted({round(i * (len(steps) - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)})
    else:
        kept = list(range(len(steps)))
    total_s, total_tokens = list(accumulate(seconds)), list(accumulate(tokens))
    return {
        "steps": [steps[i] for i in kept],
        "time": [round(total_s[i], 3) for i in kept],
        "tokens": [round(total_tokens[i]) for i in kept],
    }


def thin(series: Series, max_points: int = MAX_POINTS) -> Series:
    """Keep the first, lowest, highest and last point of each of equal stretches, so that no peak is lost."""
    n_points = len(series.steps)
    if n_points <= max_points:
        return series
    stretch = math.ceil(4 * n_points / max_points)
    kept = [
        i for start in range(0, n_points, stretch) for i in _extremes(series, start, min(start + stretch, n_points))
    ]
    return Series(series.name, tuple(series.steps[i] for i in kept), tuple(series.values[i] for i in kept))


def _extremes(series: Series, start: int, end: int) -> Iterator[int]:
    finite = [i for i in range(start, end) if series.values[i] is not None]
    if not finite:
        yield start
        return
    lowest = min(finite, key=lambda i: series.values[i] or 0.0)
    highest = max(finite, key=lambda i: series.values[i] or 0.0)
    yield from sorted({finite[0], lowest, highest, finite[-1]})
