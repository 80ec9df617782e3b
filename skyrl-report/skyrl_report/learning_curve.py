"""Learning curves of one or several runs as PNG. Importing this module does not import matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from skyrl_report.errors import DataError
from skyrl_report.series import MetricRows, Series, format_name, format_value, is_share, read_series

_COLORS = ("#2f6fde", "#e0742c", "#2a9d6f", "#9a55c8", "#c83e5d", "#7a7a7a")
_INK, _QUIET, _GRID = "#1d2430", "#6a7383", "#e6e9ee"


class _Curve(NamedTuple):
    """A line in the figure."""

    series: Series
    color: str
    width: float
    label: str | None = None
    has_points: bool = False


def plot_learning_curve(
    metrics: MetricRows,
    output: Path,
    *,
    metric: str,
    title: str,
    baselines: Mapping[str, float] | None = None,
    train_metric: str | None = None,
) -> Path:
    """Plot `metric` over the training steps, with `baselines` as dashed lines, and write the picture to `output`.

    `train_metric` is the same quantity on training rollouts. It is drawn behind `metric`, raw and smoothed.

    Raises:
        DataError: the run has no value of `metric`.
    """
    curve = _require(metrics, metric)
    curves = [_Curve(curve, _COLORS[0], 2.4, _describe_origin(metric), has_points=True)]
    if train_metric is not None and (training := read_series(metrics, train_metric)):
        smoothed = _Curve(training.smoothed(), "#8fa3c4", 1.6, "training rollouts (smoothed)")
        curves = [_Curve(training, "#c9d3e3", 1.0), smoothed, *curves]
    first, last = (format_value(metric, value) for value in (curve.first, curve.last))
    subtitle = f"{format_name(metric)}: {first} → {last} after {curve.steps[-1]} training steps"
    return _plot(curves, output, metric, title, subtitle, baselines or {})


def compare_curves(
    runs: Mapping[str, MetricRows],
    output: Path,
    *,
    metric: str,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Plot `metric` of several labeled runs in one figure. Raise DataError if a run has no value of it."""
    curves = []
    for index, (label, rows) in enumerate(runs.items()):
        curve = _require(rows, metric, label)
        text = f"{label}: {format_value(metric, curve.last)}"
        curves.append(_Curve(curve, _COLORS[index % len(_COLORS)], 2.4, text, has_points=True))
    subtitle = f"{format_name(metric)}, {_describe_origin(metric)}"
    return _plot(curves, output, metric, title, subtitle, baselines or {})


def _require(metrics: MetricRows, metric: str, label: str = "the run") -> Series:
    curve = read_series(metrics, metric)
    if not curve:
        raise DataError(f"{label} has no value of {metric!r}; evaluate at least once, or choose another metric")
    return curve


def _describe_origin(metric: str) -> str:
    names = {"eval": "evaluation", "val": "validation data", "train": "training data"}
    return names.get(metric.partition("/")[0], "training rollouts")


def _plot(
    curves: Sequence[_Curve], output: Path, metric: str, title: str, subtitle: str, baselines: Mapping[str, float]
) -> Path:
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(8, 4.8), dpi=160, facecolor="white")
    axes = figure.add_axes((0.12, 0.12, 0.84, 0.70))
    figure.text(0.03, 0.94, title, fontsize=14, fontweight="bold", color=_INK, va="center")
    figure.text(0.03, 0.875, subtitle, fontsize=10, color=_QUIET, va="center")
    axes.set_xlabel("training step", color=_QUIET)
    axes.set_ylabel(format_name(metric), color=_QUIET)
    axes.grid(axis="y", color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.tick_params(colors=_QUIET, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    for series, color, width, label, has_points in curves:
        values = [float("nan") if value is None else value for value in series.values]
        marker = "o" if has_points and len(values) <= 60 else None
        axes.plot(series.steps, values, color=color, linewidth=width, label=label, marker=marker, markersize=4.5)
    if is_share(metric):
        axes.set_ylim(-0.03, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for name, value in baselines.items():
        axes.axhline(value, color=_QUIET, linewidth=1.1, linestyle=(0, (5, 4)), zorder=1)
        axes.annotate(
            f"{name} {format_value(metric, value)}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=_QUIET,
            path_effects=[withStroke(linewidth=3.5, foreground="white")],
            zorder=5,
        )
    axes.legend(frameon=False, fontsize=9.5, labelcolor=_INK, loc="best")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, format="png")
    return output
