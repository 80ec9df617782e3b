"""`report.html`: a run on one self-contained page."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from skyrl_report.browser import write_browser
from skyrl_report.charts import Chart, Line, sparkline
from skyrl_report.curves import CurveRun, encode_curves
from skyrl_report.episodes import read_evaluation
from skyrl_report.evaluations import EvaluatedTrajectory, pick_examples
from skyrl_report.learning_curve import plot_learning_curve
from skyrl_report.metrics_file import read_metrics
from skyrl_report.run_folder import IMAGE_FOLDER, RunFolder
from skyrl_report.series import MetricRows, distinct, format_name, format_value, metric_names, read_series
from skyrl_report.status import find_problems, read_status
from skyrl_report.summary import find_method, headline_evals, headlines, select_settings, time_split
from skyrl_report.templating import render
from skyrl_report.text import show_text

# The learning curve shows the first that was measured.
_CURVES = ("eval/all/avg_score", "reward/avg_raw_reward", "val/loss", "train/loss")

_COMMAND = re.compile(r'<p class="label">command</p>\s*<pre>(.*?)</pre>', re.DOTALL)

# start of an evaluation metric → start of the same quantity on the training rollouts. The first match counts.
_TRAINING_TWIN = {
    "eval/environment/": "environment/",
    "eval/all/avg_score": "reward/avg_raw_reward",
    "eval/all/pass_at_": "reward/avg_pass_at_",
    "eval/": "",
}

# metric → (title, explanation)
PANELS = {
    "train/loss": ("Training loss", "of each step before its update; it should fall"),
    "val/loss": ("Validation loss", "the same on held-out rows; it rises when the model memorizes"),
    "train/accuracy": ("Preferred answers", "the fraction of pairs whose chosen answer has the higher reward"),
    "val/accuracy": ("Preferred held-out answers", "the same on held-out pairs; it should rise"),
    "train/margin": (
        "Reward margin",
        "mean reward of the chosen answers minus the mean reward of the rejected answers",
    ),
    "train/chosen_reward": (
        "Reward of chosen answers",
        "in DPO it may fall, if the reward of rejected answers falls more",
    ),
    "train/rejected_reward": ("Reward of rejected answers", "it should fall below the reward of chosen answers"),
    "train/grad_norm": ("Gradient norm", "before clipping; spikes mean unstable updates"),
    "train/lr": ("Learning rate", "the schedule"),
    "reward/avg_raw_reward": ("Training reward", "the mean over a step's rollouts; it should rise"),
    "policy/policy_kl": ("KL from the reference", "distance of the policy from its starting point"),
    "policy/policy_entropy": ("Entropy", "randomness of the policy; near zero, it stops exploring"),
    "policy/grad_norm": ("Gradient norm", "before clipping; spikes mean unstable updates"),
    "policy/policy_loss": ("Policy loss", "the level means little; watch for jumps"),
    "policy/rollout_train_logprobs_abs_diff_mean": (
        "Gap between engine and trainer",
        "mean difference of their log-probs; should be near zero, except in asynchronous training",
    ),
    "async/staleness_mean": ("Staleness", "steps between the weights that started a rollout and those it trains"),
    "policy/ppo_clip_ratio": ("Clipped tokens", "the fraction of tokens whose update was clipped"),
    "generate/avg_num_tokens": ("Response length", "tokens in a response"),
    "policy/policy_lr": ("Learning rate", "the schedule"),
    "trainer/tokens_per_second": ("Speed", "tokens per second"),
    "system/memory_usage": ("Memory", "gigabytes on the GPU, or of the process on a CPU"),
    "system/gpu_utilization": ("GPU utilization", "percent at the end of the step"),
    "system/cpu_utilization": ("CPU utilization", "percent of all cores of the machine during the step"),
}


def report_run(run_folder: RunFolder, *, command: str | None = None) -> Path | None:
    """Write all pages and pictures of a run. Return the path of `report.html`, or None without any metrics.

    Works for unfinished runs. Raise DataError if the metrics or an evaluation file cannot be read.
    """
    if not (rows := read_metrics(run_folder.metrics)):
        return None
    if measured := [name for name in _CURVES if any(name in row for row in rows)]:
        title = f"{run_folder.path.parent.name}: {run_folder.path.name}"
        plot_learning_curve(rows, run_folder.learning_curve, metric=measured[0], title=title)
    write_browser(run_folder)
    return write_report(run_folder, command=command)


def own_command() -> str:
    """Return the command of this process."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def write_report(
    run_folder: RunFolder, *, command: str | None = None, baselines: Mapping[str, Mapping[str, float]] | None = None
) -> Path:
    """Write `report.html` from the files in the run folder and return its path. Works for unfinished runs.

    Args:
        command: the shell command that reproduces the run. By default, the command on the previous page is kept.
        baselines: dashed lines: metric → label → value, e.g. `{"eval/environment/catch_rate": {"random play": 0.2}}`.

    Raises:
        DataError: the metrics or an evaluation file cannot be read.
    """
    page = render_report(run_folder, command=command, baselines=baselines)
    partial_page = run_folder.report.with_name(".report.html.partial")
    partial_page.write_text(page, encoding="utf-8")
    partial_page.replace(run_folder.report)  # a browser never loads half a page
    return run_folder.report


def render_report(
    run_folder: RunFolder,
    *,
    command: str | None = None,
    baselines: Mapping[str, Mapping[str, float]] | None = None,
    is_live: bool = False,
) -> str:
    """Return the text of `report.html`. A live page asks its server for news."""
    if command is None and run_folder.report.exists():
        found = _COMMAND.search(run_folder.report.read_text(encoding="utf-8"))
        command = found and Markup(found[1]).unescape()
    rows = read_metrics(run_folder.metrics)
    config_text, config = run_folder.read_config()
    last_step = max((row["step"] for row in rows), default=None)
    evaluations = _Evaluations.read(run_folder, last_step)
    return render(
        "report.html.j2",
        is_live=is_live,
        has_browser=run_folder.browser.exists() or is_live,
        now=time.strftime("%Y-%m-%d %H:%M:%S"),
        status=read_status(run_folder, rows) if run_folder.session.exists() else None,
        project=run_folder.path.resolve().parent.name,
        run=run_folder.path.resolve().name,
        last_step=last_step,
        method=find_method(config),
        problems=find_problems(run_folder, rows),
        headlines=headlines(rows, config),
        eval_charts=_eval_charts(rows, baselines or {}),
        charts=_training_charts(rows),
        time_split=time_split(rows),
        eval_table=_eval_table(rows),
        evaluations=evaluations,
        examples=pick_examples(evaluations.latest, evaluations.first),
        show_text=partial(show_text, root=run_folder.path, folder=f"evals/{IMAGE_FOLDER}"),
        settings=select_settings(config),
        changes=run_folder.read_changes(),
        command=command,
        config_text=config_text,
        all_metrics=_all_metrics(rows),
        curves=encode_curves([CurveRun(run_folder.path.resolve().name, "", "eval", rows)]) if rows else None,
    )


@dataclass(frozen=True)
class _Evaluations:
    """The first and the latest evaluation of a run. With a single evaluation, `first` is empty."""

    first_step: int | None
    latest_step: int | None
    first: list[EvaluatedTrajectory]
    latest: list[EvaluatedTrajectory]

    @classmethod
    def read(cls, run_folder: RunFolder, last_step: int | None) -> _Evaluations:
        """Read the evaluations up to `last_step`. Later ones are left over from before a rewind."""
        if run_folder.has_separate_evaluation:
            return cls(None, None, [], read_evaluation(run_folder, None))
        steps = [step for step in run_folder.eval_steps() if last_step is None or step <= last_step]
        if not steps:
            return cls(None, None, [], [])
        first = read_evaluation(run_folder, steps[0]) if len(steps) > 1 else []
        return cls(steps[0], steps[-1], first, read_evaluation(run_folder, steps[-1]))

    @property
    def is_separate(self) -> bool:
        """True if the run only evaluates. Its evaluation has no step."""
        return self.latest_step is None and bool(self.latest)

    @property
    def env_classes(self) -> str:
        return ", ".join(sorted({trajectory.env_class for trajectory in self.latest}))

    @property
    def failure(self) -> str:
        """Number of failed rollouts in the latest evaluation and the first reason, or "" if none failed."""
        failed = [trajectory for trajectory in self.latest if trajectory.score is None]
        reason = f"; the first: {failed[0].error}" if failed and failed[0].error else ""
        return f"{len(failed)} of {len(self.latest)} rollouts failed and have no score{reason}" if failed else ""


def _eval_charts(rows: MetricRows, baselines: Mapping[str, Mapping[str, float]]) -> list[Chart]:
    """Return charts of the headline evaluations, each with the same quantity on training rollouts."""
    charts = []
    for evaluation in headline_evals(rows):
        lines = [Line("evaluation", evaluation, "eval")]
        name = evaluation.name
        start, twin = next(item for item in _TRAINING_TWIN.items() if name.startswith(item[0]))
        if training := read_series(rows, twin + name.removeprefix(start)):
            lines = [
                Line("", training, "raw"),
                Line("training rollouts", training.smoothed(), "train", is_smoothed=True),
                *lines,
            ]
        charts.append(Chart(format_name(name).capitalize(), "", lines, baselines.get(name, {})))
    return charts


def _training_charts(rows: MetricRows) -> list[Chart]:
    """Return the panels that the run has metrics for. Without evaluations, add the environments' rates."""
    panels = dict(PANELS)
    if not headline_evals(rows):
        rates = [n for n in metric_names(rows) if n.startswith("environment/") and n.endswith("_rate")]
        titles = {n: (format_name(n).capitalize(), "reported by the environment") for n in sorted(rates, key=len)}
        panels = titles | panels
    charts = []
    for series in distinct(read_series(rows, name) for name in panels):
        if series.name.endswith(("_lr", "/lr")):
            lines = [Line("", series, "train")]
        else:
            lines = [Line("", series, "raw"), Line("", series.smoothed(), "train", is_smoothed=True)]
        charts.append(Chart(*panels[series.name], lines))
    return charts


def _eval_table(rows: MetricRows) -> dict[str, Any] | None:
    """Return column titles and, for each evaluated step, the values as text. None without evaluations."""
    names = [name for name in metric_names(rows) if name.startswith("eval/") and "/generate/" not in name]
    names.sort(key=lambda name: (not name.startswith("eval/all/"), len(name.split("/"))))
    columns = distinct(read_series(rows, name) for name in names)
    points = [(column.name, dict(zip(column.steps, column.values, strict=True))) for column in columns]
    steps = sorted({step for _, values in points for step in values})
    if not steps:
        return None
    table = []
    for step in steps:
        found = [(name, values.get(step)) for name, values in points]
        table.append((step, ["–" if value is None else format_value(name, value) for name, value in found]))
    return {"titles": [name.removeprefix("eval/") for name, _ in points], "rows": table}


def _all_metrics(rows: MetricRows) -> list[dict[str, Any]]:
    table = []
    for name in metric_names(rows):
        if series := read_series(rows, name):
            values = (series.first, series.last, min(series.finite), max(series.finite))
            numbers = [format_value(name, value) for value in values]
            n_gaps = series.n_not_finite
            table.append({"name": name, "spark": sparkline(series), "numbers": numbers, "n_not_finite": n_gaps})
    return table
