"""`report.html`: a run on one page that needs nothing else, for reading, keeping and sending."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from skyrl_train.report.charts import Chart, Line, sparkline
from skyrl_train.report.evaluations import Example, pick_examples, read_evaluation
from skyrl_train.report.series import MetricRows, format_value, metric_names, read_series, readable
from skyrl_train.report.summary import duration, headline_evals, headlines, settings, time_split
from skyrl_train.tracking import RunFolder, read_metrics

_SPECIAL_TOKEN = re.compile(r"<\|[^|<>\s]{1,40}\|>|</?s>|\[/?INST\]")

# evaluation metric → the same quantity on the training rollouts
_TRAINING_TWIN = {
    "eval/environment/": "environment/",
    "eval/all/avg_score": "reward/avg_raw_reward",
    "eval/all/pass_at_": "reward/avg_pass_at_",
}

# metric → (title, what a newcomer should know)
_PANELS = {
    "reward/avg_raw_reward": ("Training reward", "the mean over a step's rollouts; it should rise"),
    "policy/policy_kl": ("KL from the reference", "how far the policy has moved from where it started"),
    "policy/policy_entropy": ("Entropy", "how undecided the policy is; near zero it stops exploring"),
    "policy/grad_norm": ("Gradient norm", "before clipping; spikes mean unstable updates"),
    "policy/policy_loss": ("Policy loss", "its level says little; watch for jumps"),
    "policy/ppo_clip_ratio": ("Clipped tokens", "the share whose update the clip held back"),
    "generate/avg_num_tokens": ("Response length", "tokens in a response"),
    "policy/policy_lr": ("Learning rate", "the schedule"),
    "trainer/tokens_per_second": ("Speed", "tokens per second"),
}


def write_report(run_folder: RunFolder, *, command: str | None = None) -> Path:
    """Write the page of a run, finished or not, from whatever its folder holds, and return its path.

    `command` is what the page says reproduces the run; by default, the entry point with the run's own `config.yaml`.
    Raises `DataError` when the metrics or an evaluation file cannot be read.
    """
    rows = read_metrics(run_folder.metrics)
    config = _read_config(run_folder)
    steps = run_folder.eval_steps()
    page = _template().render(
        project=run_folder.path.resolve().parent.name,
        run=run_folder.path.resolve().name,
        last_step=max((row["step"] for row in rows), default=None),
        headlines=headlines(rows),
        eval_charts=_eval_charts(rows),
        charts=_training_charts(rows),
        time_split=time_split(rows),
        eval_table=_eval_table(rows),
        eval_step=steps[-1] if steps else None,
        first_eval_step=steps[0] if steps else None,
        examples=_examples(run_folder, steps),
        settings=settings(config),
        command=command or (_command(run_folder) if config else None),
        config_text=run_folder.config_yaml.read_text("utf-8") if config else "",
        all_metrics=_all_metrics(rows),
    )
    run_folder.report.write_text(page, encoding="utf-8")
    return run_folder.report


def _read_config(run_folder: RunFolder) -> Mapping[str, Any]:
    if not run_folder.config_yaml.exists():
        return {}
    config = yaml.safe_load(run_folder.config_yaml.read_text("utf-8"))
    return config if isinstance(config, Mapping) else {}


def _command(run_folder: RunFolder) -> str:
    folder = shlex.quote(str(run_folder.path))
    return f"python -m skyrl_train.entrypoints.main_base --config-dir {folder} --config-name config"


def _eval_charts(rows: MetricRows) -> list[Chart]:
    """The headline evaluations, each over the same quantity on the training rollouts."""
    charts = []
    for name in headline_evals(rows):
        lines = []
        if training := read_series(rows, _training_twin(name)):
            lines = [Line("", training, "raw"), Line("training rollouts, smoothed", training.smoothed(), "train")]
        lines.append(Line("evaluation", read_series(rows, name), "eval"))
        charts.append(Chart(readable(name).capitalize(), "", lines))
    return charts


def _training_twin(name: str) -> str:
    for start, twin in _TRAINING_TWIN.items():
        if name.startswith(start):
            return twin + name.removeprefix(start)
    return name.removeprefix("eval/")


def _training_charts(rows: MetricRows) -> list[Chart]:
    charts = []
    for name, (title, note) in _PANELS.items():
        if series := read_series(rows, name):
            charts.append(Chart(title, note, [Line("", series, "raw"), Line("", series.smoothed(), "train")]))
    return charts


def _eval_table(rows: MetricRows) -> dict[str, Any] | None:
    """Column titles, and for each evaluated step its values as text; None for a run without evaluations."""
    names = [name for name in metric_names(rows) if name.startswith("eval/") and read_series(rows, name)]
    columns = [dict(zip(series.steps, series.values, strict=True)) for series in (read_series(rows, n) for n in names)]
    steps = sorted({step for column in columns for step in column})
    if not steps:
        return None
    cells = [[_cell(name, column.get(step)) for name, column in zip(names, columns, strict=True)] for step in steps]
    return {"titles": [name.removeprefix("eval/") for name in names], "rows": list(zip(steps, cells, strict=True))}


def _cell(name: str, value: float | None) -> str:
    return "–" if value is None else format_value(name, value)


def _examples(run_folder: RunFolder, steps: list[int]) -> list[Example]:
    if not steps:
        return []
    first = read_evaluation(run_folder, steps[0]) if len(steps) > 1 else []
    return pick_examples(read_evaluation(run_folder, steps[-1]), first)


def _all_metrics(rows: MetricRows) -> list[dict[str, Any]]:
    found = [series for name in metric_names(rows) if (series := read_series(rows, name))]
    return [
        {
            "name": series.name,
            "spark": sparkline(series),
            "numbers": [
                format_value(series.name, value)
                for value in (series.first, series.last, min(series.finite), max(series.finite))
            ],
            "n_not_finite": series.n_not_finite,
        }
        for series in found
    ]


def mark_special_tokens(text: str) -> Markup:
    """Escaped text in which control tokens, e.g. `<|im_end|>`, stand back."""
    pieces, end = [], 0
    for match in _SPECIAL_TOKEN.finditer(text):
        pieces += [escape(text[end : match.start()]), Markup('<span class="token">{}</span>').format(match[0])]
        end = match.end()
    return Markup("").join([*pieces, escape(text[end:])])


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("skyrl_train", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["mark_special_tokens"] = mark_special_tokens
    environment.filters["duration"] = duration
    return environment.get_template("report.html.j2")
