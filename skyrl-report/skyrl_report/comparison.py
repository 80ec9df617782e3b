"""`skyrl report compare`: several runs on one self-contained page."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from skyrl_report.charts import Chart, Line
from skyrl_report.curves import CurveRun, encode_curves, group_key
from skyrl_report.errors import DataError
from skyrl_report.metrics_file import read_metrics
from skyrl_report.page import PANELS
from skyrl_report.run_folder import RunFolder
from skyrl_report.series import MetricRows, format_name, format_value, read_series
from skyrl_report.settings import leaves
from skyrl_report.summary import Headline, find_method, headline_evals, headlines
from skyrl_report.templating import render

MAX_GROUPS = 7
"""Number of colors in the stylesheet. Runs with the same settings but other seeds share one."""

MAX_RUNS = 35


@dataclass(frozen=True)
class ComparedRun:
    """A run on the page. `style` is the class of its color. `headlines` are its results by label."""

    path: Path
    name: str
    style: str
    rows: MetricRows
    config: Mapping[str, Any]
    headlines: Mapping[str, Headline]

    @property
    def method(self) -> str:
        method = find_method(self.config)
        return "" if method is None else method.title

    @property
    def last_step(self) -> int:
        return max(row["step"] for row in self.rows)

    @property
    def settings(self) -> dict[str, str]:
        """Settings as {key: text}, without the run name and paths in the run folder, because these always differ."""
        values = dict(leaf for section, settings in self.config.items() for leaf in leaves(settings, section))
        keys = ("trainer.output_dir", "trainer.project_name", "trainer.run_name")
        parts = [str(values[key]) for key in keys if key in values]
        folders = [self.path, *([Path(*parts)] if len(parts) == len(keys) else [])]  # the second may be relative
        texts = {}
        for key, value in values.items():
            is_inside = isinstance(value, str) and any(Path(value).is_relative_to(folder) for folder in folders)
            if key != "trainer.run_name" and not is_inside:  # YAML on one line
                text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
                texts[key] = text.removesuffix("...\n").strip()
        return texts


def compare_runs(folders: Sequence[Path], output: Path) -> Path:
    """Write a page that compares runs: results, curves, and the settings that differ. Runs may be unfinished.

    Raises:
        DataError: a run has no metrics or is listed twice, there are fewer than two or more than `MAX_RUNS` runs or
            `MAX_GROUPS` different settings, or `output` cannot be written.
    """
    paths = [folder.resolve() for folder in folders]
    if not 2 <= len(paths) <= MAX_RUNS:
        raise DataError(f"pass 2 to {MAX_RUNS} run folders, not {len(paths)}")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    runs: list[ComparedRun] = []
    groups: dict[str, int] = {}
    for folder, path in zip(folders, paths, strict=True):
        if paths.count(path) > 1:
            raise DataError(f"{folder} is listed twice; pass each run folder once")
        run_folder = RunFolder(path)
        rows = read_metrics(run_folder.metrics)
        if not rows:
            raise DataError(f"{folder} has no metrics.jsonl with a step in it; pass the folder of a run")
        _, config = run_folder.read_config()
        results = {headline.label: headline for headline in headlines(rows, config)}
        groups.setdefault(group_key(config), len(groups))
        style = f"c{groups[group_key(config)]}"
        runs.append(ComparedRun(path, path.relative_to(root).as_posix(), style, rows, config, results))
    if len(groups) > MAX_GROUPS:
        raise DataError(f"the runs have {len(groups)} different settings; compare at most {MAX_GROUPS} at once")
    first = {run.style: run.name for run in reversed(runs)}  # a group is named after its first run
    settings = [run.settings for run in runs]
    values = {key: [own.get(key, "–") for own in settings] for key in _union(settings)}
    page = render(
        "comparison.html.j2",
        is_live=False,
        runs=runs,
        titles=_union(run.headlines for run in runs),
        nothing=Headline("", "–", ""),
        settings={key: texts for key, texts in values.items() if len(set(texts)) > 1},
        charts=_charts(runs),
        curves=encode_curves([CurveRun(run.name, first[run.style], run.style, run.rows) for run in runs]),
        has_groups=len(groups) < len(runs),
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {output}: {error.strerror}; choose a file with --output") from error
    return output


def _charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Return a chart for each evaluation and panel that any run has. Training curves are smoothed."""
    evaluations = _union((evaluation.name for evaluation in headline_evals(run.rows)) for run in runs)
    panels = {name: (format_name(name).capitalize(), "evaluation") for name in evaluations} | PANELS
    charts = []
    for name, (title, note) in panels.items():
        lines = []
        for run in runs:
            if series := read_series(run.rows, name):
                shown = series if name in evaluations else series.smoothed()
                label = f"{run.name}: {format_value(name, shown.last)}"
                lines.append(Line(label, shown, run.style, is_smoothed=name not in evaluations))
        if lines:
            charts.append(Chart(title, note, lines))
    return charts


def _union(parts: Iterable[Iterable[str]]) -> list[str]:
    """Return the distinct names of all parts, in order of first occurrence."""
    return list(dict.fromkeys(chain.from_iterable(parts)))
