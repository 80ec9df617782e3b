"""A run in a few numbers: headlines, where the time went, the settings that matter."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.report.series import MetricRows, Series, format_value, is_share, metric_names, read_series, readable

# Timers that run inside another one, and would be counted twice.
_INNER_TIMERS = {"policy_train", "critic_train", "cleanup_old_checkpoints"}
_OUTSIDE_STEP = {"eval"}
_N_AVERAGED = 5  # training metrics are noisy: their first and last few steps are averaged

_SETTINGS = {
    "model": "trainer.policy.model.path",
    "environment": "environment.env_class",
    "advantages": "trainer.algorithm.advantage_estimator",
    "policy loss": "trainer.algorithm.policy_loss_type",
    "loss reduction": "trainer.algorithm.loss_reduction",
    "learning rate": "trainer.policy.optimizer_config.lr",
    "prompts per step": "trainer.train_batch_size",
    "prompts per mini-batch": "trainer.policy_mini_batch_size",
    "samples per prompt": "generator.n_samples_per_prompt",
    "turns, at most": "generator.max_turns",
    "tokens per turn, at most": "generator.sampling_params.max_generate_length",
    "temperature": "generator.sampling_params.temperature",
    "KL loss": "trainer.algorithm.use_kl_loss",
    "KL coefficient": "trainer.algorithm.kl_loss_coef",
    "epochs": "trainer.epochs",
    "seed": "trainer.seed",
}


@dataclass(frozen=True)
class Headline:
    """A big number, e.g. `Headline("catch rate", "97.5%", "14.1% before training")`."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class TimeShare:
    """A part of the run's time, e.g. `TimeShare("generate", 12.5, 0.4)`."""

    name: str
    seconds: float
    share: float


def headlines(rows: MetricRows) -> list[Headline]:
    """Evaluation scores and reward before and after, then the run's size and speed; whatever the run has."""
    found = [_before_and_after(series) for name in headline_evals(rows) if (series := read_series(rows, name))]
    if reward := read_series(rows, "reward/avg_raw_reward"):
        found.append(_training_reward(reward))
    if steps := read_series(rows, "timing/step"):
        seconds = sum(steps.finite) + sum(read_series(rows, "timing/eval").finite)
        found.append(
            Headline(
                "time",
                duration(seconds),
                f"{len(steps.values)} steps, {sum(steps.finite) / len(steps.finite):.3g} s each",
            )
        )
    if speed := read_series(rows, "trainer/tokens_per_second"):
        found.append(Headline("tokens per second", f"{statistics.median(speed.finite):,.0f}", "median over the steps"))
    return found


def headline_evals(rows: MetricRows) -> list[str]:
    """Shares that environments report, e.g. a catch rate, before the general scores."""
    names = [name for name in metric_names(rows) if name.startswith(("eval/all/", "eval/environment/"))]
    wanted = [name for name in names if is_share(name) or name.endswith("/avg_score")]
    return sorted(wanted, key=lambda name: (not name.endswith("_rate"), not name.endswith("avg_score"), name))


def time_split(rows: MetricRows) -> list[TimeShare]:
    """Where the time of the whole run went, largest part first; what no timer covers is `other`."""
    prefix = "timing/"
    totals = {
        name.removeprefix(prefix): sum(read_series(rows, name).finite)
        for name in metric_names(rows)
        if name.startswith(prefix)
    }
    step_seconds = totals.pop("step", 0.0)
    parts = {name: seconds for name, seconds in totals.items() if name not in _INNER_TIMERS and seconds > 0}
    covered = sum(seconds for name, seconds in parts.items() if name not in _OUTSIDE_STEP)
    if step_seconds > covered:
        parts["other"] = step_seconds - covered
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return [TimeShare(readable(name), seconds, seconds / total) for name, seconds in ordered]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say most about a run, by their label; those that the configuration has."""
    values = {label: _at(config, path) for label, path in _SETTINGS.items()}
    return {label: value for label, value in values.items() if value is not None}


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _before_and_after(series: Series) -> Headline:
    name = series.name
    before = "before training" if series.steps[0] == 0 else f"at step {series.steps[0]}"
    note = f"{format_value(name, series.first)} {before}" if len(series.steps) > 1 else "one evaluation"
    return Headline(f"{readable(name)}, evaluation", format_value(name, series.last), note)


def _training_reward(series: Series) -> Headline:
    values = series.finite
    first, last = (statistics.fmean(part) for part in (values[:_N_AVERAGED], values[-_N_AVERAGED:]))
    n = min(_N_AVERAGED, len(values))
    note = f"{first:.3g} in the first; mean of {n} steps" if len(values) > n else f"mean of {n} steps"
    return Headline("reward, last training steps", f"{last:.3g}", note)


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
