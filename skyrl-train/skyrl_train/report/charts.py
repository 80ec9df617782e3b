"""Line charts as inline SVG; colours come from the page's stylesheet, so that they follow light and dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from skyrl_train.report.series import Series, format_value, is_share

_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 16, 24  # the margins that hold the tick labels, in SVG units
_MAX_HOVER_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One line: `style` is a class of the stylesheet (`eval`, `train` or `raw`); only `eval` shows its points."""

    label: str
    series: Series
    style: str


@dataclass(frozen=True)
class Chart:
    """A titled chart with a note for the newcomer, e.g. `Chart("Entropy", "falls as …", [line])`."""

    title: str
    note: str
    lines: Sequence[Line]
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def labelled(self) -> list[Line]:
        """The lines that the legend names."""
        return [line for line in self.lines if line.label]

    @property
    def newest(self) -> str:
        """The last value of the line in front."""
        series = self.lines[-1].series
        return format_value(series.name, series.last)

    @property
    def warning(self) -> str:
        """What the reader should know about gaps in the lines."""
        n_missing = max(line.series.n_not_finite for line in self.lines)
        values = "1 value is" if n_missing == 1 else f"{n_missing} values are"
        return f"{values} not finite: a gap in the line" if n_missing else ""

    def svg(self, width: int = 340, height: int = 190) -> Markup:
        """The picture, `width` by `height` units; it scales with its container."""
        return _svg(self, width, height)


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to SVG units."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int

    def x(self, step: float) -> float:
        low, high = self.x_range
        return _LEFT + (step - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - _BOTTOM - (value - low) / (high - low) * (self.height - _TOP - _BOTTOM)


def _svg(chart: Chart, width: int, height: int) -> Markup:
    steps = [step for line in chart.lines for step in line.series.steps]
    values = [value for line in chart.lines for value in line.series.finite] + list(chart.baselines.values())
    name = chart.lines[-1].series.name
    x_ticks = _ticks(min(steps), max(steps), integer=True)
    values += [0.0, 1.0] if is_share(name) else []
    y_ticks = _ticks(min(values), max(values))
    frame = _Frame(_widen(min(steps), max(steps)), (y_ticks[0], y_ticks[-1]), width, height)
    parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, chart.title)]
    parts.extend(_y_tick(frame, tick, format_value(name, tick, digits=4)) for tick in y_ticks)
    parts.extend(_x_tick(frame, tick) for tick in x_ticks if frame.x_range[0] <= tick <= frame.x_range[1])
    parts.extend(_baseline(frame, label, value, name) for label, value in chart.baselines.items())
    parts.extend(_path(frame, line) for line in chart.lines)
    for line in chart.lines:
        parts.extend(_points(frame, line))
    return Markup("").join([*parts, Markup("</svg>")])


def _ticks(low: float, high: float, *, integer: bool = False) -> list[float]:
    low, high = _widen(low, high)
    locator = MaxNLocator(nbins=4, integer=integer, steps=[1, 2, 2.5, 5, 10])
    return [0.0 if abs(tick) < 1e-12 * (high - low) else float(tick) for tick in locator.tick_values(low, high)]


def _widen(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty: one point, or a constant, is drawn in the middle."""
    margin = 0.5 * (abs(low) or 1.0) if low == high else 0.0
    return low - margin, high + margin


def _y_tick(frame: _Frame, tick: float, text: str) -> Markup:
    return Markup('<line class="grid" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>').format(
        _LEFT, frame.width - _RIGHT, y=frame.y(tick)
    ) + Markup('<text class="tick" x="{}" y="{:.1f}" text-anchor="end">{}</text>').format(
        _LEFT - 6, frame.y(tick) + 3.5, text
    )


def _x_tick(frame: _Frame, tick: float) -> Markup:
    return Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="middle">{:.0f}</text>').format(
        frame.x(tick), frame.height - 6, tick
    )


def _baseline(frame: _Frame, label: str, value: float, name: str) -> Markup:
    return Markup('<line class="baseline" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>').format(
        _LEFT, frame.width - _RIGHT, y=frame.y(value)
    ) + Markup('<text class="baseline-label" x="{}" y="{:.1f}" text-anchor="end">{} {}</text>').format(
        frame.width - _RIGHT, frame.y(value) - 4, label, format_value(name, value)
    )


def _path(frame: _Frame, line: Line) -> Markup:
    moves = []
    for points in line.series.runs():
        pairs = [f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in points]
        moves.append("M" + "L".join(pairs))
    return Markup('<path class="line {}" d="{}"/>').format(line.style, "".join(moves))


def _points(frame: _Frame, line: Line) -> list[Markup]:
    """Circles that say their value when pointed at; visible ones for an evaluation, unless they would touch."""
    points = [point for run in line.series.runs() for point in run]
    if line.style == "train" or len(points) > _MAX_HOVER_POINTS:
        return []
    style = "dot" if line.style == "eval" and len(points) <= 60 else "hover"
    return [
        Markup('<circle class="{} {}" cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>').format(
            style,
            line.style,
            frame.x(step),
            frame.y(value),
            3 if style == "dot" else 6,
            escape(f"step {step}: {format_value(line.series.name, value)}"),
        )
        for step, value in points
    ]


def sparkline(series: Series) -> Markup:
    """A line of the height of a word, without axes."""
    values = series.finite
    low, high = _widen(min(values), max(values))
    first, last = _widen(series.steps[0], series.steps[-1])
    moves = []
    for points in series.runs():
        pairs = [
            f"{(step - first) / (last - first) * 120:.1f} {22 - (value - low) / (high - low) * 20:.1f}"
            for step, value in points
        ]
        moves.append("M" + "L".join(pairs))
    return Markup(
        '<svg class="spark" viewBox="0 0 120 24" aria-hidden="true"><path class="line eval" d="{}"/></svg>'
    ).format("".join(moves))
