"""A run on the terminal: progress, sparklines, time, memory, the last sample and warnings. Plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skyrl_report.metrics_file import read_metrics
from skyrl_report.run_folder import RunFolder
from skyrl_report.series import Series, format_name, format_value
from skyrl_report.status import RunStatus, read_status
from skyrl_report.summary import TimeShare
from skyrl_report.watch.mirror import Mirror

BARS = "▁▂▃▄▅▆▇█"
COLORS = ("blue", "dark_orange", "green", "magenta", "red", "yellow", "cyan")
SAMPLE_LINES = 8
POLL_S = 1.0
MIRROR_S = 10.0
NUMBERS = {
    "trainer/tokens_per_second": "tokens/s",
    "system/memory_usage": "memory GB",
    "memory/step": "peak memory GB",
    "system/cpu_utilization": "CPU %",
    "system/gpu_utilization": "GPU %",
    "generate/n_invalid": "failed rollouts",
}


def watch_terminal(
    folder: RunFolder, mirror: Mirror | None, console: Console, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show the run until it ends."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for status in _follow(folder, mirror, sleep):
                live.update(show_status(folder, status, console.width), refresh=True)
        return
    step: int | None = -1
    for status in _follow(folder, mirror, sleep):
        if status.step != step or not _is_open(status):
            step = status.step
            console.print(format_line(status), soft_wrap=True, markup=False, highlight=False)


def _follow(folder: RunFolder, mirror: Mirror | None, sleep: Callable[[float], None]) -> Iterator[RunStatus]:
    """Yield the state of the run, and for the last time once it has ended."""
    while True:
        started = time.monotonic()
        status = read_status(folder, read_metrics(folder.metrics))
        reading_s = time.monotonic() - started
        yield status
        if not _is_open(status):
            return
        sleep(max(POLL_S if mirror is None else MIRROR_S, 10 * reading_s))  # a long run takes a tenth of a core at most
        if mirror is not None:
            mirror.update()


def _is_open(status: RunStatus) -> bool:
    return status.session is not None and status.session.is_alive


def format_line(status: RunStatus) -> str:
    """Return the state as one line of text."""
    parts = [status.progress]
    parts += [f"{_label(curve)} {format_value(curve.name, curve.last)}" for curve in status.curves]
    parts += [f"{label} {number}" for label, number in _numbers(status)]
    return " · ".join(parts)


def show_status(folder: RunFolder, status: RunStatus, width: int) -> RenderableType:
    """Return the state as panels of at most `width` columns."""
    path = folder.path.resolve()
    parts: list[RenderableType] = [Text(f"{path.parent.name} / {path.name}", "bold"), Text(status.progress)]
    if status.total_steps:
        bar = Table.grid()  # ends the line, unlike a bar alone
        bar.add_row(ProgressBar(status.total_steps, status.step or 0, min(width, 100)))
        parts.append(bar)
    curves = Table.grid(padding=(0, 2))
    for curve in status.curves:
        curves.add_row(
            Text(_label(curve), "dim"), format_value(curve.name, curve.last), Text(sparkline(curve), COLORS[0])
        )
    for label, number in _numbers(status):
        curves.add_row(Text(label, "dim"), number, "")
    parts.append(curves)
    if status.times:
        parts += [_time_bar(status.times, min(width, 100)), _time_legend(status.times)]
    parts += [Text(f"! {text}", "yellow") for text in status.warnings]
    if (sample := status.sample) is not None:
        score = "invalid" if sample.score is None else f"score {sample.score:.3g}"
        lines = f"{sample.prompt.strip()[-300:]}\n→ {sample.response.strip()}".splitlines()
        text = Text("\n".join(lines[-SAMPLE_LINES:]), overflow="fold")
        title = f"last sample · {sample.env_class} · {score}"
        parts.append(Panel(text, title=title, title_align="left", border_style="dim"))
    return Group(*parts)


def sparkline(series: Series, width: int = 40) -> str:
    """Draw a series with block characters, averaged to at most `width` points.

    >>> sparkline(Series("a", (1, 2, 3, 4), (0.0, 1.0, None, 2.0)))
    '▁▅█'
    """
    values = series.finite
    n_points = min(width, len(values))
    bounds = [i * len(values) // n_points for i in range(n_points + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    top = len(BARS) - 1
    return "".join(BARS[round((mean - low) / (high - low) * top) if high > low else top // 2] for mean in means)


def _numbers(status: RunStatus) -> Iterator[tuple[str, str]]:
    return (
        (label, format_value(name, status.latest[name])) for name, label in NUMBERS.items() if name in status.latest
    )


def _label(curve: Series) -> str:
    name = format_name(curve.name)
    return f"eval {name}" if curve.name.startswith("eval/") else name


def _time_bar(times: Sequence[TimeShare], width: int) -> Text:
    bar = Text()
    for i, part in enumerate(times):
        bar.append("█" * round(part.share * width), COLORS[i % len(COLORS)])
    return bar


def _time_legend(times: Sequence[TimeShare]) -> Text:
    legend = Text()
    for i, part in enumerate(times):
        legend.append("■ ", COLORS[i % len(COLORS)]).append(f"{part.name} {part.share:.0%}  ")
    return legend
