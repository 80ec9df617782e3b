"""The gap between the engine that sampled and the policy that is trained: its corrections and its metrics.

Throughout, κ = π_old / π_rollout is the ratio of the trainer's probability of a sampled token to the engine's, with its
logarithm held within ±20. Everything is detached. Products of κ are sums of logarithms, so none overflows.

A trajectory of several rows is corrected row by row, because its rows may be on different ranks: "trajectory" means a
row here.
"""

from __future__ import annotations

import math

from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.config.policy_loss import OffPolicyCorrectionConfig
from skyrl_train.lazy import no_grad, torch
from skyrl_train.types import MetricKind, MetricSums

SUMMARY: tuple[MetricKind, ...] = ("mean", "std", "max", "min")
ROLLOUT_GAP_METRICS = (
    *(f"{name}_{kind}" for name in ("rollout_train_logprobs_abs_diff", "is_ratio") for kind in SUMMARY),
    "rollout_train_kl",
    "is_ratio_ess_share",
)
"""Metrics of `add_rollout_gap`."""


@no_grad
def correction_weights(
    old_log_probs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    loss_mask: torch.Tensor,
    config: OffPolicyCorrectionConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the factor on the policy loss of each token (B, R), 0 outside the mask, and metrics (B, R) by name.

    Four steps, each on the tokens that the steps before it kept:

    1. outlier: a trajectory with a token whose κ is outside of `outlier_token_is_threshold_{low,high}` is left out.
    2. token mask: a token whose κ is outside of `token_mask_is_threshold_{low,high}` is left out.
    3. truncated importance sampling: the weight is min(κ, cap) of the token, or of the product over the trajectory.
    4. sequence mask: a trajectory is left out if its product of κ, or its geometric mean, is outside of its interval.

    The divisor of the loss is still that of all trained tokens: the tokens that are kept weigh no more for it.

    Metrics are averaged over the trained tokens of the mini-batch, so those of trajectories count them by their tokens:

    outlier_seq_{masked,over_high,under_low}_ratio             left out by step 1, and on which side an outlier is
    token_mask_ratio                                           left out by step 2
    tis_token_clip_high_ratio, tis_seq_clip_high_ratio         capped by step 3
    {product,geo}_sequence_mask_{masked,over_high,under_low}_ratio   left out by step 4, and on which side
    off_policy_weight_mean                                     the weight itself

    Sources: 3 per token, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (Yao et al., 2025,
    https://fengyao.notion.site/off-policy-rl); 3 per sequence and 4, When Speed Kills Stability (Liu et al., 2025,
    https://richardli.xyz/rl-collapse); 2, IcePop in Every Step Evolves (Ling Team, 2025,
    arXiv:2510.18855).
    """
    log_ratio = (old_log_probs - rollout_logprobs).clamp(-20, 20)  # (B, R) log κ, read only on kept tokens
    kept = loss_mask > 0  # (B, R)
    metrics: dict[str, torch.Tensor] = {}
    low, high = config.outlier_token_is_threshold_low, config.outlier_token_is_threshold_high
    if low is not None or high is not None:
        under, over = ((kept & side).any(dim=-1, keepdim=True) for side in _outside(log_ratio, low, high))  # (B, 1)
        kept = _drop_rows(kept, under, over, "outlier_seq", metrics)
    low, high = config.token_mask_is_threshold_low, config.token_mask_is_threshold_high
    if low is not None or high is not None:
        under, over = _outside(log_ratio, low, high)
        metrics["token_mask_ratio"] = kept & (under | over)
        kept = kept & ~(under | over)
    weights = torch.ones_like(log_ratio)
    if config.tis_ratio_type is not None:
        weights = _truncated_ratio(log_ratio, kept, config, metrics)
    if config.sequence_mask_metric is not None:
        log_value = _log_product(log_ratio, kept)  # (B, 1)
        name, low, high = "product_sequence_mask", config.product_mask_low, config.product_mask_high
        if config.sequence_mask_metric == "geometric":
            name, low, high = "geo_sequence_mask", config.geo_mask_low, config.geo_mask_high
            log_value = log_value / kept.sum(dim=-1, keepdim=True).clamp(min=1)
        kept = _drop_rows(kept, *_outside(log_value, low, high), name, metrics)
    weights = torch.where(kept, weights, 0.0)
    return weights, {name: x.to(weights.dtype) for name, x in metrics.items()} | {"off_policy_weight_mean": weights}


def _truncated_ratio(
    log_ratio: torch.Tensor,
    kept: torch.Tensor,
    config: OffPolicyCorrectionConfig,
    metrics: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return min(κ, cap) of each token, or of the product over each row's kept tokens (B, R); add the metric."""
    if config.tis_ratio_type == "token":
        name, cap = "tis_token_clip_high_ratio", config.token_tis_ratio_clip_high
    else:
        name, cap = "tis_seq_clip_high_ratio", config.sequence_tis_ratio_clip_high
        log_ratio = _log_product(log_ratio, kept).expand_as(log_ratio)
    metrics[name] = kept & (log_ratio > math.log(cap))
    return log_ratio.clamp(max=math.log(cap)).exp()


def _log_product(log_ratio: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the product of κ over each row's kept tokens (B, 1)."""
    return torch.where(kept, log_ratio, 0.0).sum(dim=-1, keepdim=True)


def _outside(log_ratio: torch.Tensor, low: float | None, high: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the ratios below `low` and of those above `high`; None is no bound."""
    under = log_ratio < (-math.inf if low is None else math.log(low))
    over = log_ratio > (math.inf if high is None else math.log(high))
    return under, over


def _drop_rows(
    kept: torch.Tensor, under: torch.Tensor, over: torch.Tensor, name: str, metrics: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return the kept tokens (B, R) without the rows (B, 1) outside of an interval; add metrics of what is dropped."""
    for side, is_out in (("masked", under | over), ("over_high", over), ("under_low", under)):
        metrics[f"{name}_{side}_ratio"] = kept & is_out
    return kept & ~(under | over)


@no_grad
def add_rollout_gap(
    sums: MetricSums, old_log_probs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> None:
    """Measure the gap between trainer and engine on the trained tokens; all inputs (B, R).

    rollout_train_logprobs_abs_diff_{mean,std,max,min}  of |log κ|, in nats; std is that of the tokens, not an estimate
    is_ratio_{mean,std,max,min}                         of κ; its mean is near 1 however large the gap is
    rollout_train_kl                                    mean of κ - log κ - 1, an unbiased estimate of
                                                        KL(π_rollout || π_old) per token that is never negative (k3)
    is_ratio_ess_share                                  (Σκ)² / (n Σκ²), the effective sample size of tokens weighted by
                                                        κ as a fraction of them: 1 where κ is the same everywhere, 1/n
                                                        where one token outweighs all others

    There are no metrics without a trained token. The formulas of the last two: Approximating KL Divergence (Schulman,
    2020, http://joschu.net/blog/kl-approx.html); Sequential Imputations (Kong et al., 1994).
    """
    log_ratio = (old_log_probs - rollout_logprobs)[loss_mask > 0]  # (N,) log κ
    sums.add_samples("rollout_train_logprobs_abs_diff", log_ratio.abs(), SUMMARY)
    log_ratio = log_ratio.double().clamp(-20, 20)
    ratio = log_ratio.exp()
    sums.add_samples("is_ratio", ratio, SUMMARY)
    sums.add_samples("rollout_train_kl", torch.expm1(log_ratio) - log_ratio)
    sums.add_samples("is_ratio_ess_share", ratio, ("ess",))


@no_grad
def sequence_mask(
    log_probs: torch.Tensor,
    behavior_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    """Return 1 on the trained tokens of trajectories that stay in the loss, 0 elsewhere; all (B, R).

    A trajectory is left out if its mean advantage is negative and its tokens have become less likely than they were to
    the policy μ that sampled them, by more than `threshold` nats on average: mean(log μ - log π) > threshold. The
    policy no longer makes such a mistake, and unlearning it does harm.

    Source: DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556), section 3.1.
    """
    is_bad = masked_mean(advantages, loss_mask, dim=-1) < 0  # (B,)
    drift = masked_mean(behavior_log_probs - log_probs, loss_mask, dim=-1)  # (B,)
    is_left_out = is_bad & (drift > threshold)
    return ((loss_mask > 0) & ~is_left_out[:, None]).to(log_probs.dtype)
