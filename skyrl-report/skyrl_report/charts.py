"""Line charts as inline SVG. The page's stylesheet sets the colors, for light and dark mode."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from markupsafe import Markup, escape

from skyrl_report.series import Series, format_value, is_share

_MAX_HOVER_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One line of a chart. `style` is a stylesheet class (`eval`, `train` or `raw`). Only `eval` shows its points."""

    label: str
    series: Series
    style: str
    is_smoothed: bool = False


@dataclass(frozen=True)
class Chart:
    """A titled chart with an explanatory note, e.g. `Chart("Entropy", "falls as …", [line])`."""

    title: str
    note: str
    lines: Sequence[Line]
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def labeled(self) -> list[Line]:
        """Lines that appear in the legend."""
        return [line for line in self.lines if line.label]

    @property
    def spec(self) -> str:
        """The chart as JSON for `curves.js`. It smooths all lines but evaluations and learning rates itself."""
        lines = [line for line in self.lines if line.style != "raw"]
        described = {line.series.name: line for line in lines}  # in a comparison, a line per run
        content = {
            "title": self.title,
            "lines": [
                {"metric": name, "label": line.label, "style": line.style, "smoothed": line.is_smoothed}
                for name, line in described.items()
            ],
            "baselines": dict(self.baselines),
        }
        return json.dumps(content, ensure_ascii=False)

    @property
    def newest(self) -> str:
        """The last value of the front line, formatted."""
        series = self.lines[-1].series
        return format_value(series.name, series.last)

    @property
    def warning(self) -> str:
        """Explanation of gaps in the lines, or an empty string."""
        n_missing = max(line.series.n_not_finite for line in self.lines)
        values = "1 value is" if n_missing == 1 else f"{n_missing} values are"
        return f"{values} NaN or infinite: a gap in the line" if n_missing else ""

    def svg(self, width: int = 340, height: int = 190) -> Markup:
        """Draw the chart with a view box of `width` × `height`. It scales with its container."""
        steps = [step for line in self.lines for step in line.series.steps]
        values = [value for line in self.lines for value in line.series.finite] + list(self.baselines.values())
        name = self.lines[-1].series.name
        x_ticks = _ticks(min(steps), max(steps), integer=True)
        values += [0.0, 1.0] if is_share(name) else []
        y_ticks = _ticks(min(values), max(values))
        labels = _labels(name, y_ticks)
        left = max(_Frame.left, 12 + 6 * max(map(len, labels)))
        frame = _Frame(_widen(min(steps), max(steps)), (y_ticks[0], y_ticks[-1]), width, height, left)
        parts = [Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(width, height, self.title)]
        for tick, text in zip(y_ticks, labels, strict=True):
            parts += [frame.rule(tick, "grid"), _text("tick", frame.left - 6, frame.y(tick) + 3.5, "end", text)]
        for i, tick in enumerate(tick for tick in x_ticks if frame.x_range[0] <= tick <= frame.x_range[1]):
            text = f"{tick:.0f}" if i else f"step {tick:.0f}"
            parts.append(_text("tick", frame.x(tick), height - 6, "middle", text))
        for label, value in self.baselines.items():
            text = f"{label} {format_value(name, value)}"
            label_y = frame.y(value) - 4
            parts += [frame.rule(value, "baseline"), _text("baseline-label", width - frame.right, label_y, "end", text)]
        parts.extend(frame.path(line.series, line.style) for line in self.lines)
        for line in self.lines:
            parts.extend(_points(frame, line))
        return Markup("").join([*parts, Markup("</svg>")])


@dataclass(frozen=True)
class _Frame:
    """Maps steps and values to SVG units inside margins that hold the tick labels."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int
    height: int
    left: int = 46
    right: int = 12
    top: int = 16
    bottom: int = 24

    def x(self, step: float) -> float:
        low, high = self.x_range
        return self.left + (step - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)

    def path(self, series: Series, style: str) -> Markup:
        """Draw a series as one path, with gaps."""
        stretches = ([(self.x(step), self.y(value)) for step, value in points] for points in series.runs())
        moves = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _thin(points)) for points in stretches)
        return Markup('<path class="line {}" d="{}"/>').format(style, moves)

    def rule(self, value: float, style: str) -> Markup:
        """Draw a horizontal line at a value."""
        line = Markup('<line class="{}" x1="{}" x2="{}" y1="{y:.1f}" y2="{y:.1f}"/>')
        return line.format(style, self.left, self.width - self.right, y=self.y(value))


def _thin(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Thin out points that share a pixel column: yield its first, lowest, highest and last. It looks the same."""
    for _, column in groupby(points, key=lambda point: int(point[0])):
        inside = list(column)
        ys = [y for _, y in inside]
        yield from (inside[i] for i in sorted({0, ys.index(min(ys)), ys.index(max(ys)), len(ys) - 1}))


def _text(style: str, x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(style, x, y, anchor, text)


def _ticks(low: float, high: float, *, integer: bool = False) -> list[float]:
    from matplotlib.ticker import MaxNLocator  # not at the top: a run must start without matplotlib

    low, high = _widen(low, high)
    locator = MaxNLocator(nbins=4, integer=integer, steps=[1, 2, 2.5, 5, 10])
    return [0.0 if abs(tick) < 1e-12 * (high - low) else float(tick) for tick in locator.tick_values(low, high)]


def _labels(name: str, ticks: Sequence[float]) -> list[str]:
    """Format ticks with as many digits as they need to differ."""
    for digits in range(4, 12):
        labels = [format_value(name, tick, digits=digits) for tick in ticks]
        if len(set(labels)) == len(ticks):
            break
    return labels


def _widen(low: float, high: float) -> tuple[float, float]:
    """Widen an empty range, so that a single point or a constant line is centered."""
    margin = 0.5 * (abs(low) or 1.0) if low == high else 0.0
    return low - margin, high + margin


def _points(frame: _Frame, line: Line) -> list[Markup]:
    """Draw circles that show their value on hover. Evaluation points are visible unless there are too many."""
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
    """Draw a word-sized line without axes."""
    x_range = _widen(series.steps[0], series.steps[-1])
    frame = _Frame(x_range, _widen(min(series.finite), max(series.finite)), 120, 24, left=0, right=0, top=2, bottom=2)
    path = frame.path(series, "eval")
    return Markup('<svg class="spark" viewBox="0 0 120 24" aria-hidden="true">{}</svg>').format(path)
