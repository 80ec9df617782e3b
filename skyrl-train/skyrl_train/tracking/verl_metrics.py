"""Metrics of reinforcement learning under the names of recipes for verl."""

from __future__ import annotations

from collections.abc import Mapping

from skyrl_train.tracking.system import system_metrics

NAMES = {
    "train/policy_loss": "policy/policy_loss",
    "train/value_loss": "critic/critic_loss",
    "train/kl_loss": "policy/policy_kl",
    "train/reward": "reward/avg_raw_reward",
    "train/advantage": "loss/avg_raw_advantages",
    "train/entropy": "policy/policy_entropy",
    "train/learning_rate": "policy/policy_lr",
}
"""Our metric of each name. A step without it, as one without a critic, has no such metric."""


def verl_metrics(metrics: Mapping[str, float], step: int, n_sampled_tokens: int) -> dict[str, float]:
    """Return the metrics of a step under those names, with its number, the sampled tokens per second, and `system/`."""
    renamed = {name: metrics[ours] for name, ours in NAMES.items() if ours in metrics}
    throughput = n_sampled_tokens / metrics["timing/generate"]
    return {**renamed, "train/global_step": float(step), "rollout/throughput": throughput, **system_metrics()}
