"""Learning curves of one or several runs as PNG. Importing this module does not import matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_train.errors import DataError
from skyrl_train.report.series import MetricRows, Series, format_name, format_value, is_share, read_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#2f6fde", "#e0742c", "#2a9d6f", "#9a55c8", "#c83e5d", "#7a7a7a")
_INK, _QUIET, _GRID = "#1d2430", "#6a7383", "#e6e9ee"


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
    figure, axes = _canvas(title, _change(curve), metric)
    if train_metric is not None and (training := read_series(metrics, train_metric)):
        _draw(axes, training, "#c9d3e3", 1.0)
        _draw(axes, training.smoothed(), "#8fa3c4", 1.6, label="training rollouts (smoothed)")
    _draw(axes, curve, _COLORS[0], 2.4, label=_describe_origin(metric), has_points=True)
    return _finish(figure, axes, baselines or {}, metric, output)


def compare_curves(
    runs: Mapping[str, MetricRows],
    output: Path,
    *,
    metric: str,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> Path:
    """Plot `metric` of several labeled runs in one picture. DataError if a run has no value of it."""
    figure, axes = _canvas(title, f"{format_name(metric)}, {_describe_origin(metric)}", metric)
    for index, (label, rows) in enumerate(runs.items()):
        curve = _require(rows, metric, label)
        text = f"{label}: {format_value(metric, curve.last)}"
        _draw(axes, curve, _COLORS[index % len(_COLORS)], 2.4, label=text, has_points=True)
    return _finish(figure, axes, baselines or {}, metric, output)


def _require(metrics: MetricRows, metric: str, label: str = "the run") -> Series:
    curve = read_series(metrics, metric)
    if not curve:
        raise DataError(f"{label} has no value of {metric!r}; evaluate at least once, or choose another metric")
    return curve


def _change(curve: Series) -> str:
    first, last = (format_value(curve.name, value) for value in (curve.first, curve.last))
    return f"{format_name(curve.name)}: {first} → {last} after {curve.steps[-1]} training steps"


def _describe_origin(metric: str) -> str:
    names = {"eval": "evaluation", "val": "validation data", "train": "training data"}
    return names.get(metric.partition("/")[0], "training rollouts")


def _canvas(title: str, subtitle: str, metric: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

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
    return figure, axes


def _draw(
    axes: Axes, curve: Series, color: str, width: float, *, label: str | None = None, has_points: bool = False
) -> None:
    values = [float("nan") if value is None else value for value in curve.values]
    marker = "o" if has_points and len(values) <= 60 else None
    axes.plot(curve.steps, values, color=color, linewidth=width, label=label, marker=marker, markersize=4.5)


def _finish(figure: Figure, axes: Axes, baselines: Mapping[str, float], metric: str, output: Path) -> Path:
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import PercentFormatter

    if is_share(metric):
        axes.set_ylim(-0.03, 1.06)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for label, value in baselines.items():
        axes.axhline(value, color=_QUIET, linewidth=1.1, linestyle=(0, (5, 4)), zorder=1)
        axes.annotate(
            f"{label} {format_value(metric, value)}",
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
