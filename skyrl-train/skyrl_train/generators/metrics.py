"""Numbers about rollouts. Invalid trajectories are counted, and read by nothing else."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

from skyrl_gym.metrics import aggregate_by_environment
from skyrl_train.types import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`generate/*` and `environment/*`: response lengths in tokens, turns, and what the environments report."""
    valid = [t for t in trajectories if t.is_valid]
    metrics = {
        "generate/n_invalid": float(len(trajectories) - len(valid)),
        "generate/n_retries": float(sum(t.n_attempts - 1 for t in trajectories)),
    }
    for stop_reason, n in Counter(t.stop_reason for t in trajectories if not t.is_valid).items():
        metrics[f"generate/n_invalid/{stop_reason}"] = float(n)
    if not valid:
        return metrics
    lengths = [t.n_response_tokens for t in valid]
    metrics |= {
        "generate/min_num_tokens": min(lengths),
        "generate/max_num_tokens": max(lengths),
        "generate/avg_num_tokens": statistics.fmean(lengths),
        "generate/std_num_tokens": statistics.pstdev(lengths),
    }
    if any(t.turns for t in valid):  # a generator of one's own may not say
        metrics["generate/avg_turns"] = statistics.fmean(len(t.turns) for t in valid)
    for name, keep in (("non_zero", lambda t: t.total_reward != 0), ("zero", lambda t: t.total_reward == 0)):
        if some := [t.n_response_tokens for t in valid if keep(t)]:
            metrics[f"generate/avg_tokens_{name}_rewards"] = statistics.fmean(some)
    metrics |= _component_metrics(valid)
    return metrics | aggregate_by_environment([t.env_class for t in valid], [t.env_metrics for t in valid])


def _component_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/component/*`: the mean total of each named part of the reward over the trajectories that report it."""
    totals: dict[str, list[float]] = {}
    for t in trajectories:
        for name, total in t.reward_components.items():
            totals.setdefault(name, []).append(total)
    return {f"reward/component/{name}": statistics.fmean(values) for name, values in sorted(totals.items())}


def reward_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """`avg_score`, `pass_at_n` and `mean_positive_reward` of the valid trajectories.

    A prompt passes when one of its trajectories has a positive total reward. `mean_positive_reward` averages the sum
    of each trajectory's positive rewards.
    """
    valid = [t for t in trajectories if t.is_valid]
    if not valid:
        return {}
    passed: dict[str, bool] = {}
    for t in valid:
        passed[t.id.instance_id] = passed.get(t.id.instance_id, False) or t.total_reward > 0
    return {
        "avg_score": statistics.fmean(t.total_reward for t in valid),
        f"pass_at_{n_samples}": statistics.fmean(passed.values()),
        "mean_positive_reward": statistics.fmean(_positive_reward(t) for t in valid),
    }


def _positive_reward(trajectory: Trajectory) -> float:
    """Return the sum of the positive rewards of all segments."""
    return sum(reward for segment in trajectory.segments for reward in segment.rewards if reward > 0)


def pass_at_k(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`pass_at_k` for k = 1, 2, 4, …: the probability that one of k samples of a prompt passes, averaged over prompts.

    Of the n valid samples of a prompt, c pass: 1 - C(n - c, k) / C(n, k), over the prompts that have k samples.

    Source: Evaluating Large Language Models Trained on Code (Chen et al., 2021, arXiv:2107.03374), equation 1.
    """
    samples: dict[str, list[bool]] = {}
    for t in trajectories:
        if t.is_valid:
            samples.setdefault(t.id.instance_id, []).append(t.total_reward > 0)
    most = max(map(len, samples.values()), default=0)
    metrics = {}
    for k in (2**i for i in range(most.bit_length())):
        enough = [passed for passed in samples.values() if len(passed) >= k]
        failing = [math.comb(passed.count(False), k) / math.comb(len(passed), k) for passed in enough]
        metrics[f"pass_at_{k}"] = 1 - statistics.fmean(failing)
    return metrics


def training_reward_metrics(trajectories: Sequence[Trajectory], n_samples: int) -> dict[str, float]:
    """The same under the names that training rewards have: `reward/avg_raw_reward`, `reward/avg_pass_at_n`, …

    Where there are several data sources, for each of them too: `reward/<data source>/avg_raw_reward`, …
    """
    groups = {"reward": list(trajectories)}
    sources = by_source(trajectories)
    if len(sources) > 1:
        groups |= {f"reward/{name}": some for name, some in sources.items()}
    names = {"avg_score": "avg_raw_reward", f"pass_at_{n_samples}": f"avg_pass_at_{n_samples}"}
    metrics: dict[str, float] = {}
    for prefix, some in groups.items():
        of_group = {names.get(name, name): value for name, value in reward_metrics(some, n_samples).items()}
        metrics |= with_prefix(prefix, of_group)
    return metrics


TAKEN = frozenset({"all", "aggregated_results", "component"})
"""What stands for something else in names of metrics and of files: a data source of that name gets a "_" after it."""


def by_source(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories under what files and metrics of their data source are called: a "/" in it is a "_"."""
    groups: dict[str, list[Trajectory]] = {}
    for t in sorted(trajectories, key=lambda t: t.data_source):
        name = t.data_source.replace("/", "_")
        groups.setdefault(f"{name}_" if name in TAKEN else name, []).append(t)
    return groups


def with_prefix(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """The same metrics with `prefix/` before each name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
