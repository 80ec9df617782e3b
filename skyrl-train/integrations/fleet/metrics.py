"""Metrics of Fleet runs by environment, under the same names in both entrypoints, and alerts on failing tools."""

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence

from integrations.fleet.env import ENV_CLASS
from integrations.fleet.slack import SlackError, post
from skyrl_train.callbacks import Callback, Run, StepReport
from skyrl_train.generators.metrics import by_source
from skyrl_train.types import Trajectory

logger = logging.getLogger(__name__)

MAX_TOOL_ERROR_RATE = 0.5


def fleet_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """Return `reward/*` and `rollouts/*` over all trajectories and, as `reward/<environment>/*`, per environment.

    Invalid trajectories are counted and otherwise ignored.
    """
    n_valid = sum(t.is_valid for t in trajectories)
    metrics = {
        "rollouts/total": float(len(trajectories)),
        "rollouts/valid": float(n_valid),
        "rollouts/invalid": float(len(trajectories) - n_valid),
    }
    metrics |= {f"reward/{name}": value for name, value in _spread(trajectories).items()}
    for env_key, group in by_source(trajectories).items():
        metrics[f"rollout/{env_key}/n_invalid"] = float(sum(not t.is_valid for t in group))
        metrics[f"rollout/{env_key}/env_init_failed"] = float(sum(not t.is_valid and not t.turns for t in group))
        spread = _spread(group)
        if spread:
            positive = [t.total_reward for t in group if t.is_valid and t.total_reward > 0]
            spread[f"pass_at_{n_samples}"] = statistics.fmean(
                max(rewards) > 0 for rewards in _rewards_by_prompt(group).values()
            )
            spread["mean_positive_reward"] = statistics.fmean(positive) if positive else 0.0
        metrics |= {f"reward/{env_key}/{name}": value for name, value in spread.items()}
    return metrics


def _spread(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean variance of a prompt's rewards, and the fraction of prompts with different rewards.

    Prompts with one valid trajectory are ignored. Empty if no trajectory is valid.
    """
    groups = _rewards_by_prompt(trajectories)
    if not groups:
        return {}
    variances = [statistics.pvariance(rewards) for rewards in groups.values() if len(rewards) > 1]
    return {
        "variance_per_prompt": statistics.fmean(variances) if variances else 0.0,
        "signal_ratio": statistics.fmean(variance > 0 for variance in variances) if variances else 0.0,
    }


def _rewards_by_prompt(trajectories: Sequence[Trajectory]) -> dict[tuple[int, str], list[float]]:
    groups: dict[tuple[int, str], list[float]] = {}
    for t in trajectories:
        if t.is_valid:
            groups.setdefault((t.id.draw, t.id.instance_id), []).append(t.total_reward)
    return groups


def find_tool_errors(metrics: Mapping[str, float]) -> list[str]:
    """Return a sentence for each environment in which more than half of a step's calls failed."""
    prefixes = (f"environment/{ENV_CLASS}/", f"eval/environment/{ENV_CLASS}/")
    return [
        f"{name} is {value:.0%}, above {MAX_TOOL_ERROR_RATE:.0%}"
        for name, value in metrics.items()
        if name.startswith(prefixes) and name.endswith("tool_error_rate") and value > MAX_TOOL_ERROR_RATE
    ]


async def send_alert(text: str) -> None:
    """Post an alert to Slack. Log a warning if that fails."""
    try:
        await asyncio.to_thread(post, text)
    except SlackError as error:
        logger.warning("The alert was not sent: %s", error)


class FleetMetrics(Callback):
    """A callback that adds `fleet_metrics` to a step before it is logged."""

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if report.trajectories:
            report.metrics |= fleet_metrics(report.trajectories, run.cfg.generator.n_samples_per_prompt)


class ToolErrorAlert(Callback):
    """A callback that warns, in the log and on Slack, of environments where most of a step's tool calls failed."""

    async def on_step_end(self, run: Run, report: StepReport) -> None:
        if not (problems := find_tool_errors(report.metrics)):
            return
        text = f"{run.cfg.trainer.run_name}, step {report.global_step}: {'; '.join(problems)}"
        logger.warning(text)
        await send_alert(text)
