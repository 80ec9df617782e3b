"""Correct and measure the gap between the engine that samples and the policy that trains.

κ = π_old / π_rollout is the trainer's probability of a sampled token divided by the engine's, with log κ clamped to
±20. Everything is detached. Products of κ are computed as sums of log κ, so none overflows.

A trajectory of several rows is corrected row by row, because its rows may be on different ranks. So "trajectory" means
a row here.
"""

from __future__ import annotations

import math

from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
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

    Each of the four steps works on the tokens that the steps before it kept:

    1. outlier: drop a trajectory if the κ of any token is outside `outlier_token_is_threshold_{low,high}`.
    2. token mask: drop a token if its κ is outside `token_mask_is_threshold_{low,high}`.
    3. truncated importance sampling: multiply by min(κ, cap) of the token, or of the product over the trajectory.
    4. sequence mask: drop a trajectory if its product or geometric mean of κ is outside its interval.

    The loss is still divided by all trained tokens, so dropping one does not raise the weight of the rest.

    Example of step 3 per token. The trainer gives the tokens twice, half and ten times the engine's probability:

    >>> kappa = torch.tensor([[2.0, 0.5, 10.0]])
    >>> config = OffPolicyCorrectionConfig(tis_ratio_type="token", token_tis_ratio_clip_high=2.0)
    >>> weights, _ = correction_weights(kappa.log(), torch.zeros(1, 3), torch.ones(1, 3), config)
    >>> weights
    tensor([[2.0000, 0.5000, 2.0000]])

    Metrics are averaged over the trained tokens of the mini-batch, so a dropped trajectory counts by its tokens:

    outlier_seq_{masked,over_high,under_low}_ratio             dropped by step 1, and on which side
    token_mask_ratio                                           dropped by step 2
    tis_token_clip_high_ratio, tis_seq_clip_high_ratio         capped by step 3
    {product,geo}_sequence_mask_{masked,over_high,under_low}_ratio   dropped by step 4, and on which side
    off_policy_weight_mean                                     the weight itself

    Sources: step 3 per token, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (Yao et al., 2025,
    https://fengyao.notion.site/off-policy-rl). Steps 3 per sequence and 4, When Speed Kills Stability (Liu et al.,
    2025, https://richardli.xyz/rl-collapse). Step 2, IcePop in Every Step Evolves (Ling Team, 2025, arXiv:2510.18855).
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
        name, cap, log_weight = "tis_token_clip_high_ratio", config.token_tis_ratio_clip_high, log_ratio
        if config.tis_ratio_type == "sequence":
            name, cap = "tis_seq_clip_high_ratio", config.sequence_tis_ratio_clip_high
            log_weight = _log_product(log_ratio, kept).expand_as(log_ratio)
        metrics[name] = kept & (log_weight > math.log(cap))
        weights = log_weight.clamp(max=math.log(cap)).exp()  # (B, R)
    if config.sequence_mask_metric is not None:
        log_value = _log_product(log_ratio, kept)  # (B, 1)
        name, low, high = "product_sequence_mask", config.product_mask_low, config.product_mask_high
        if config.sequence_mask_metric == "geometric":
            name, low, high = "geo_sequence_mask", config.geo_mask_low, config.geo_mask_high
            log_value = log_value / kept.sum(dim=-1, keepdim=True).clamp(min=1)
        kept = _drop_rows(kept, *_outside(log_value, low, high), name, metrics)
    weights = torch.where(kept, weights, 0.0)
    return weights, {name: x.to(weights.dtype) for name, x in metrics.items()} | {"off_policy_weight_mean": weights}


def _log_product(log_ratio: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return log Π κ over each row's kept tokens (B, 1)."""
    return torch.where(kept, log_ratio, 0.0).sum(dim=-1, keepdim=True)


def _outside(log_ratio: torch.Tensor, low: float | None, high: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masks of the ratios below `low` and above `high`. None disables a bound."""
    under = log_ratio < (-math.inf if low is None else math.log(low))
    over = log_ratio > (math.inf if high is None else math.log(high))
    return under, over


def _drop_rows(
    kept: torch.Tensor, under: torch.Tensor, over: torch.Tensor, name: str, metrics: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Remove the rows `under` and `over` (B, 1) from `kept` (B, R), and record the dropped tokens as metrics."""
    for side, is_out in (("masked", under | over), ("over_high", over), ("under_low", under)):
        metrics[f"{name}_{side}_ratio"] = kept & is_out
    return kept & ~(under | over)


@no_grad
def add_rollout_gap(
    sums: MetricSums, old_log_probs: torch.Tensor, rollout_logprobs: torch.Tensor, loss_mask: torch.Tensor
) -> None:
    """Add metrics of the gap between trainer and engine on the trained tokens. All inputs are (B, R).

    rollout_train_logprobs_abs_diff_{mean,std,max,min}  of |log κ|, in nats (std is the population's, over the tokens)
    is_ratio_{mean,std,max,min}                         of κ (the mean stays near 1 however large the gap is)
    rollout_train_kl                                    mean of κ - log κ - 1, an unbiased estimate of
                                                        KL(π_rollout || π_old) per token that is never negative (k3)
    is_ratio_ess_share                                  (Σκ)² / (n Σκ²), the effective sample size of tokens weighted by
                                                        κ, as a fraction of n: 1 if all κ are equal, 1/n if one token
                                                        outweighs the rest

    Without a trained token, nothing is added. Sources of the last two: Approximating KL Divergence (Schulman, 2020,
    http://joschu.net/blog/kl-approx.html). Sequential Imputations (Kong et al., 1994).
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
    """Return 1 on the trained tokens of trajectories that stay in the loss, 0 elsewhere. All tensors are (B, R).

    A trajectory is dropped if its mean advantage is negative and its tokens have become less likely than under the
    policy μ that sampled them, by more than `threshold` nats on average: mean(log μ - log π) > threshold. The policy no
    longer makes such a mistake, so unlearning it further only does harm.

    Both trajectories have become less likely by 2 nats per token, but only the first one is bad:

    >>> behavior, advantages = torch.full((2, 2), -1.0), torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    >>> sequence_mask(behavior - 2, behavior, advantages, torch.ones(2, 2), threshold=1.0)
    tensor([[0., 0.],
            [1., 1.]])

    Source: DeepSeek-V3.2 (DeepSeek-AI, 2025, arXiv:2512.02556), section 3.1.
    """
    is_bad = masked_mean(advantages, loss_mask, dim=-1) < 0  # (B,)
    drift = masked_mean(behavior_log_probs - log_probs, loss_mask, dim=-1)  # (B,)
    is_left_out = is_bad & (drift > threshold)
    return ((loss_mask > 0) & ~is_left_out[:, None]).to(log_probs.dtype)
