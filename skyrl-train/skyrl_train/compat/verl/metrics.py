"""Metrics of reinforcement learning under the names that verl and its recipes use."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence

import psutil
import torch

from skyrl_train.config import SkyRLConfig
from skyrl_train.tracking.system import system_metrics
from skyrl_train.types import Trajectory

NAMES = {
    "actor/pg_loss": "policy/policy_loss",
    "actor/kl_loss": "policy/policy_kl",
    "actor/entropy": "policy/policy_entropy",
    "actor/pg_clipfrac": "policy/ppo_clip_ratio",
    "actor/pg_clipfrac_lower": "policy/dual_clip_ratio",
    "actor/grad_norm": "policy/grad_norm",
    "actor/lr": "policy/policy_lr",
    "actor/reward_kl_penalty": "loss/avg_kl",
    "actor/reward_kl_penalty_coeff": "loss/kl_loss_coef",
    "critic/rewards/mean": "loss/avg_final_rewards",
    "critic/advantages/mean": "loss/avg_raw_advantages",
    "critic/vf_loss": "critic/critic_loss",
    "critic/vf_clipfrac": "critic/values_clipfrac",
    "critic/vpred_mean": "critic/values_mean",
    "critic/lr": "critic/critic_lr",
    "rollout_corr/k3_kl": "policy/rollout_train_kl",
    "timing_s/step": "timing/step",
    "timing_s/gen": "timing/generate",
    "timing_s/adv": "timing/compute_advantages_and_returns",
    "timing_s/update_critic": "timing/critic_train",
    "timing_s/update_actor": "timing/policy_train",
    "timing_s/update_weights": "timing/sync_weights",
    "timing_s/testing": "timing/eval",
    "timing_s/save_checkpoint": "timing/save_checkpoint",
    "perf/time_per_step": "timing/step",
    "train/policy_loss": "policy/policy_loss",  # from here on, names of recipes
    "train/value_loss": "critic/critic_loss",
    "train/kl_loss": "policy/policy_kl",
    "train/reward": "reward/avg_raw_reward",
    "train/advantage": "loss/avg_raw_advantages",
    "train/entropy": "policy/policy_entropy",
    "train/learning_rate": "policy/policy_lr",
}
"""verl's names, mapped to ours. If a step lacks our metric (e.g. without a critic), it also lacks verl's."""


def verl_metrics(
    metrics: Mapping[str, float], trajectories: Sequence[Trajectory], step: int, cfg: SkyRLConfig
) -> dict[str, float]:
    """Return a step's metrics under verl's names, the step number, the rollout speed, and `system/`.

    A step without trajectories is an evaluation before training, so it has only evaluation scores.
    """
    scores = {}
    for name, value in metrics.items():
        found = re.fullmatch(r"eval/([^/]+)/avg_score", name)
        if found is not None and found[1] != "all":
            scores[f"val-core/{found[1]}/reward/mean@{cfg.generator.eval_n_samples_per_prompt}"] = value
    if not trajectories:
        return scores
    renamed = {name: metrics[ours] for name, ours in NAMES.items() if ours in metrics}
    if cfg.trainer.algorithm.use_kl_loss:
        renamed["actor/kl_coef"] = cfg.trainer.algorithm.kl_loss_coef
    sampled = sum(turn.end - turn.start for t in trajectories for turn in t.turns)
    seconds = metrics["timing/step" if cfg.trainer.fully_async.enabled else "timing/generate"]
    return {
        **scores,
        **renamed,
        "training/global_step": float(step),
        "train/global_step": float(step),
        "rollout/throughput": sampled / seconds,
        **_describe_trajectories([t for t in trajectories if t.is_valid]),
        **_describe_speed(metrics, trajectories, cfg),
        **system_metrics(),
    }


def _describe_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean, minimum and maximum of scores and lengths, and the fraction of truncated responses."""
    if not trajectories:
        return {}
    values: dict[str, list[float]] = {
        "critic/score": [t.total_reward for t in trajectories],
        "response_length": [t.n_response_tokens for t in trajectories],
        "prompt_length": [len(t.segments[0].prompt_ids) for t in trajectories],
    }
    described: dict[str, float] = {}
    for name, numbers in values.items():
        summary = {"mean": statistics.fmean(numbers), "max": max(numbers), "min": min(numbers)}
        described |= {f"{name}/{kind}": float(value) for kind, value in summary.items()}
    truncated = [t.last_stop_reason == "length" for t in trajectories]
    return {**described, "response_length/clip_ratio": statistics.fmean(truncated)}


def _describe_speed(
    metrics: Mapping[str, float], trajectories: Sequence[Trajectory], cfg: SkyRLConfig
) -> dict[str, float]:
    """Return the number of tokens, tokens per second and GPU, milliseconds per token, and memory in GiB."""
    n_tokens = sum(t.n_tokens for t in trajectories)
    n_tokens_of = {
        "gen": sum(t.n_response_tokens for t in trajectories),
        **dict.fromkeys(("adv", "update_critic", "update_actor"), n_tokens),
    }
    speed = {
        "perf/total_num_tokens": float(n_tokens),
        "perf/throughput": n_tokens / metrics["timing/step"] / math.prod(cfg.trainer.placement.size("policy")),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }
    for name, n in n_tokens_of.items():
        if (ours := NAMES[f"timing_s/{name}"]) in metrics and n > 0:
            speed[f"timing_per_token_ms/{name}"] = metrics[ours] * 1000 / n
    if torch.cuda.is_available():
        speed["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        speed["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    return speed
