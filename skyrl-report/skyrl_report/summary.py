"""The summary of a run: headlines, time by stage and the most important settings."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from skyrl_report.series import MetricRows, Series, distinct, format_name, format_value, metric_names, read_series
from skyrl_report.settings import leaves

_OUTSIDE_STEP = {"eval"}  # timers that run between steps
_TIMER_NAMES = {
    "generate": "rollouts",
    "fwd_logprobs_values_reward": "log-probs",
    "compute_advantages_and_returns": "advantages",
    "policy_train": "update",
    "sync_weights": "weight sync",
    "eval": "evaluation",
}
_SMALLEST_SHARE = 0.005
_N_AVERAGED = 5  # first and last steps over which the noisy training reward is averaged

_SETTINGS = {
    "model": "trainer.policy.model.path",
    "LoRA rank": "trainer.policy.model.lora.rank",
    "advantages": "trainer.algorithm.advantage_estimator",
    "policy loss": "trainer.algorithm.policy_loss_type",
    "loss reduction": "trainer.algorithm.loss_reduction",
    "DPO loss": "trainer.dpo.loss_type",
    "DPO beta": "trainer.dpo.beta",
    "learning rate": "trainer.policy.optimizer_config.lr",
    "schedule": "trainer.policy.optimizer_config.scheduler",
    "rows per step": "trainer.train_batch_size",
    "prompts per mini-batch": "trainer.policy_mini_batch_size",
    "samples per prompt": "generator.n_samples_per_prompt",
    "max turns": "generator.max_turns",
    "max tokens per turn": "generator.sampling_params.max_generate_length",
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


class Method(NamedTuple):
    """A training method, e.g. `Method("Supervised fine-tuning", "rows")`."""

    title: str
    unit: str
    """Items that a batch consists of, e.g. rows or pairs."""


@dataclass(frozen=True)
class TimeShare:
    """A share of the run's time, e.g. `TimeShare("rollouts", 12.5, 0.4)`."""

    name: str
    seconds: float
    share: float


def headlines(rows: MetricRows, config: Mapping[str, Any]) -> list[Headline]:
    """Return scores and rewards before and after training, time and speed. Metrics that were not logged are skipped."""
    found = [_before_and_after(series) for series in headline_evals(rows)]
    success_reward = (config.get("generator") or {}).get("success_reward")
    rule = "reward > 0" if success_reward is None else f"reward ≥ {success_reward:g}"
    found = [replace(h, label=f"{h.label} ({rule})") if h.label.startswith("pass at") else h for h in found]
    if (failed := read_series(rows, "eval/generate/n_invalid")) and failed.last:
        found.append(Headline("failed rollouts", f"{failed.last:.0f}", "of the last evaluation, without a score"))
    losses = {"train/loss": "training loss", "val/loss": "validation loss", "val/accuracy": "validation accuracy"}
    for name, label in losses.items():
        if loss := read_series(rows, name):
            found.append(replace(_before_and_after(loss), label=label))
    if reward := read_series(rows, "reward/avg_raw_reward"):
        first, last = reward.finite[:_N_AVERAGED], reward.finite[-_N_AVERAGED:]
        note = f"{statistics.fmean(first):.3g} in the first {len(first)} steps"
        found.append(Headline("training reward", f"{statistics.fmean(last):.3g}", note))
    if steps := read_series(rows, "timing/step"):
        total = sum(part.seconds for part in time_split(rows))
        found.append(Headline("time", format_duration(total), f"{statistics.median(steps.finite):.2g} s per step"))
    if speed := read_series(rows, "trainer/tokens_per_second"):
        found.append(Headline("tokens per second", f"{statistics.median(speed.finite):,.0f}", "median over the steps"))
    return found


def headline_evals(rows: MetricRows) -> list[Series]:
    """Return the evaluations that answer "did it learn?": the environments' rates (else pass@k) and the mean score."""
    names = metric_names(rows)
    rates = [n for n in names if n.startswith("eval/environment/") and n.endswith("_rate")]
    rates = sorted(rates, key=len) or [n for n in names if n.startswith("eval/all/pass_at_")]
    return distinct(read_series(rows, name) for name in [*rates, "eval/all/avg_score"])


def time_split(rows: MetricRows) -> list[TimeShare]:
    """Return the time by stage, largest first. `other` is small stages plus time outside the timers."""
    prefix = "timing/"
    totals = {
        name.removeprefix(prefix): sum(read_series(rows, name).finite)
        for name in metric_names(rows)
        if name.startswith(prefix)
    }
    step_seconds = totals.pop("step", 0.0)
    covered = sum(seconds for name, seconds in totals.items() if name not in _OUTSIDE_STEP)
    other = max(0.0, step_seconds - covered)
    total = sum(totals.values()) + other
    large = {name: seconds for name, seconds in totals.items() if seconds > _SMALLEST_SHARE * total}
    other += sum(seconds for name, seconds in totals.items() if name not in large)
    ordered = sorted(large.items(), key=lambda part: -part[1])
    if other > 0:
        ordered.append(("other", other))
    return [TimeShare(_TIMER_NAMES.get(name, format_name(name)), seconds, seconds / total) for name, seconds in ordered]


def find_method(config: Mapping[str, Any]) -> Method | None:
    """Return the training method of a configuration, or None if the configuration is empty."""
    trainer, data = config.get("trainer") or {}, config.get("data") or {}
    if "dpo" in trainer:
        return Method("Direct preference optimization", "pairs")
    if "algorithm" in trainer:
        return Method("Reinforcement learning", "prompts")
    if "chosen_key" in data:
        return Method("Reward modeling", "pairs")
    return Method("Supervised fine-tuning", "rows") if "max_length" in data else None


def select_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return {label: value} of the most important settings in a configuration."""
    found = dict(leaf for section, settings in config.items() for leaf in leaves(settings, section))
    values = {label: found.get(path) for label, path in _SETTINGS.items()}
    if values["LoRA rank"] == 0:
        values["LoRA rank"] = None
    if (method := find_method(config)) is not None:
        values = {label.replace("rows per", f"{method.unit} per"): value for label, value in values.items()}
    return {
        label: str(value).lower() if isinstance(value, bool) else str(value)
        for label, value in values.items()
        if value is not None
    }


def format_duration(seconds: float) -> str:
    """Format seconds as `4.2 s`, `42 s`, `3 min 05 s` or `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _before_and_after(series: Series) -> Headline:
    name = series.name
    before = "before training" if series.steps[0] == 0 else f"at step {series.steps[0]}"
    note = f"{format_value(name, series.first)} {before}" if len(series.steps) > 1 else "the only evaluation"
    return Headline(format_name(name), format_value(name, series.last), note)
