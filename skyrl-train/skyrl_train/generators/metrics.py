"""Metrics of rollouts. Invalid trajectories are counted but otherwise ignored."""

import hashlib
import statistics
from collections import Counter
from collections.abc import Sequence

from skyrl_gym.metrics import aggregate_by_environment, all_fail_probability
from skyrl_train.types import StopReason, Trajectory

MAX_NAME_BYTES = 100
"""Maximum length of a data source's name in file names and metrics. Most file systems allow 255 bytes per name."""

RESERVED = frozenset({"all", "aggregated_results", "component"})
"""Names of metrics and files that a data source must not use. `by_source` appends a "_" to them."""


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `generate/*`, `reward/component/*` and `environment/*`. Lengths are response lengths in tokens."""
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
        "generate/truncated_ratio": statistics.fmean(map(is_truncated, valid)),
    }
    if any(t.turns for t in valid):  # other generators may not report turns
        metrics["generate/avg_turns"] = statistics.fmean(len(t.turns) for t in valid)
    for name, is_zero in (("non_zero", False), ("zero", True)):
        if group := [t.n_response_tokens for t in valid if (t.total_reward == 0) == is_zero]:
            metrics[f"generate/avg_tokens_{name}_rewards"] = statistics.fmean(group)
    components: dict[str, list[float]] = {}
    for t in valid:
        for name, total in t.reward_components.items():
            components.setdefault(name, []).append(total)
    metrics |= {f"reward/component/{name}": statistics.fmean(totals) for name, totals in sorted(components.items())}
    return metrics | aggregate_by_environment([t.env_class for t in valid], [t.env_metrics for t in valid])


def is_truncated(trajectory: Trajectory) -> bool:
    """Return True if the trajectory or its last reply reached a length limit."""
    reasons = [trajectory.stop_reason, *(turn.stop_reason for turn in trajectory.turns[-1:])]
    return StopReason.LENGTH in reasons


def is_success(trajectory: Trajectory, success_reward: float | None) -> bool:
    """Return True if the total reward is at least `success_reward`, or above 0 if that is None."""
    if not trajectory.is_valid:
        return False
    return trajectory.total_reward > 0 if success_reward is None else trajectory.total_reward >= success_reward


def reward_metrics(
    trajectories: Sequence[Trajectory], n_samples: int, success_reward: float | None
) -> dict[str, float]:
    """Return `avg_score`, `pass_at_n` and `mean_positive_reward` of the valid trajectories.

    A drawn prompt passes if one of its trajectories is a success. `mean_positive_reward` is each trajectory's sum of
    positive rewards, averaged over trajectories.
    """
    valid = [t for t in trajectories if t.is_valid]
    if not valid:
        return {}
    positive = [sum(max(reward, 0.0) for segment in t.segments for reward in segment.rewards) for t in valid]
    return {
        "avg_score": statistics.fmean(t.total_reward for t in valid),
        f"pass_at_{n_samples}": statistics.fmean(any(passed) for passed in _passed_by_draw(valid, success_reward)),
        "mean_positive_reward": statistics.fmean(positive),
    }


def pass_at_k(trajectories: Sequence[Trajectory], success_reward: float | None) -> dict[str, float]:
    """Return `pass_at_k` for k = 1, 2, 4, …: the probability that at least one of k samples passes.

    It is averaged over prompts with at least k valid samples.
    """
    samples = _passed_by_draw([t for t in trajectories if t.is_valid], success_reward)
    max_samples = max(map(len, samples), default=0)
    metrics = {}
    for k in (2**i for i in range(max_samples.bit_length())):
        failing = [all_fail_probability(len(passed), passed.count(True), k) for passed in samples if len(passed) >= k]
        metrics[f"pass_at_{k}"] = 1 - statistics.fmean(failing)
    return metrics


def _passed_by_draw(trajectories: Sequence[Trajectory], success_reward: float | None) -> list[list[bool]]:
    """Return a list for each drawn prompt: whether each of its samples is a success."""
    samples: dict[tuple[int, str], list[bool]] = {}
    for t in trajectories:
        samples.setdefault((t.id.draw, t.id.instance_id), []).append(is_success(t, success_reward))
    return list(samples.values())


def training_reward_metrics(
    trajectories: Sequence[Trajectory], n_samples: int, success_reward: float | None
) -> dict[str, float]:
    """Return `reward/avg_raw_reward`, `reward/avg_pass_at_n` and `reward/mean_positive_reward`.

    With several data sources, also return them per source: `reward/<data source>/avg_raw_reward` and so on.
    """
    groups = {"reward": list(trajectories)}
    sources = by_source(trajectories)
    if len(sources) > 1:
        groups |= {f"reward/{name}": group for name, group in sources.items()}
    names = {"avg_score": "avg_raw_reward", f"pass_at_{n_samples}": f"avg_pass_at_{n_samples}"}
    return {
        f"{prefix}/{names.get(name, name)}": value
        for prefix, group in groups.items()
        for name, value in reward_metrics(group, n_samples, success_reward).items()
    }


def by_source(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Group trajectories by data source. Keys are names that are safe in file names and metrics.

    Slashes and control characters become "_". The end of a long name is replaced by a hash.
    """
    groups: dict[str, list[Trajectory]] = {}
    for t in sorted(trajectories, key=lambda t: t.data_source):
        name = "".join("_" if c == "/" or not c.isprintable() else c for c in t.data_source)
        if len(name.encode()) > MAX_NAME_BYTES:
            digest = hashlib.blake2b(t.data_source.encode(), digest_size=4).hexdigest()
            name = f"{name.encode()[: MAX_NAME_BYTES - 9].decode(errors='ignore')}_{digest}"
        groups.setdefault(f"{name}_" if name in RESERVED else name, []).append(t)
    return groups


def with_prefix(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    """Prefix each name with `prefix/`."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
