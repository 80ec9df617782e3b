"""Losses that preserve entropy by restraining tokens with a high covariance of log-prob and advantage.

Such tokens lower the policy's entropy. Their covariance compares them with the rest of the mini-batch, so these losses
need the whole mini-batch in one call.
"""

from __future__ import annotations

from skyrl_train.algorithms.losses.clipped import pessimistic_surrogate
from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, within_mask
from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch


@register_policy_loss("clip_cov", whole_batch=True)
@within_mask
def clip_cov(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute PPO's clipped surrogate, but 0 for a few randomly chosen tokens of high covariance.

    Candidates are the tokens with clip_cov_lb < cov < clip_cov_ub that PPO does not clip. For N trained tokens in the
    mini-batch, max(⌊clip_ratio · N⌋, 1) candidates, drawn with torch's CPU generator, are dropped. All tensors (B, R).
    Metrics: `ppo_clip_ratio` as in `regular`, and `masked_token_ratio`, the fraction of dropped tokens.

    Source: The Entropy Mechanism of Reinforcement Learning (Cui et al., 2025, arXiv:2505.22617), section 4.2.
    """
    loss, is_clipped = pessimistic_surrogate(tokens.ratio, tokens.advantages, config)
    covariance = token_covariance(tokens.log_probs, tokens.advantages, tokens.mask)
    settings = config.clip_cov
    is_high = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    rows, columns = ((tokens.mask > 0) & ~is_clipped & is_high).nonzero(as_tuple=True)
    n_dropped = min(_n_chosen(settings.clip_ratio, tokens.mask), len(rows))
    drawn = torch.rand(len(rows), device="cpu").topk(n_dropped).indices.to(rows.device)  # padding changes no draw
    is_left_out = torch.zeros_like(is_clipped)
    is_left_out[rows[drawn], columns[drawn]] = True
    return torch.where(is_left_out, 0.0, loss), {
        "ppo_clip_ratio": is_clipped.to(loss.dtype),
        "masked_token_ratio": is_left_out.to(loss.dtype),
    }


@register_policy_loss("kl_cov", whole_batch=True, reads_eps_clip=False)
@within_mask
def kl_cov(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -ρA, plus ppo_kl_coef · |log ρ| on the tokens of highest covariance, with ρ = π / π_old.

    Of the N trained tokens in the mini-batch, max(⌊kl_cov_frac · N⌋, 1) have the penalty. All tensors (B, R). Metric
    `kl_cov_ratio`: the fraction of tokens with the penalty.

    Source: The Entropy Mechanism of Reinforcement Learning (Cui et al., 2025, arXiv:2505.22617), section 4.2.
    """
    covariance = token_covariance(tokens.log_probs, tokens.advantages, tokens.mask)  # (B, R)
    highest = (
        covariance.masked_fill(tokens.mask <= 0, -torch.inf)
        .flatten()
        .topk(_n_chosen(config.kl_cov.kl_cov_frac, tokens.mask))
        .indices
    )
    pays = torch.zeros_like(covariance).flatten().index_fill(0, highest, 1.0).view_as(covariance)
    penalty = config.kl_cov.ppo_kl_coef * tokens.log_ratio.abs()
    loss = -tokens.ratio * tokens.advantages + pays * penalty
    return loss, {"kl_cov_ratio": pays}


def token_covariance(log_probs: torch.Tensor, advantages: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return (A - mean A)(log π - mean log π) of each token (B, R), detached, with means over trained tokens."""
    log_probs = log_probs.detach()
    return (advantages - masked_mean(advantages, loss_mask)) * (log_probs - masked_mean(log_probs, loss_mask))


def _n_chosen(share: float, loss_mask: torch.Tensor) -> int:
    """Return `share` of the number of trained tokens, rounded down, but at least 1 if there are any."""
    n_tokens = int((loss_mask > 0).sum())
    return min(max(int(share * n_tokens), 1), n_tokens)
