"""A trust region in probability: drop tokens whose probability has changed too much."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, importance_ratio, within_mask
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch


@register_policy_loss("dppo", reads_rollout_logprobs=True, reads_eps_clip=False)
@within_mask
def dppo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -sg(min(ρ, max_ratio)) · A · log π with ρ = π / μ, and 0 for tokens outside the trust region.

    μ is the policy that sampled: the engine's probabilities, or the old ones if the engine reports none. A token is
    outside if A > 0, π > μ and D(μ, π) > delta_high, or if A < 0, π < μ and D(μ, π) > delta_low. D is a distance of two
    Bernoulli distributions, "this token or any other": |π - μ| for `binary_tv`, KL(μ || π) for `binary_kl`. Unlike
    PPO's ratio, D measures the change in probability. A token that goes from 0.001 to 0.002 stays (D = 0.001), and one
    that goes from 0.5 to 0.9 does not (D = 0.4).

    All tensors (B, R). Metric `masked_token_ratio`: the fraction of dropped tokens.

    Source: Rethinking the Trust Region in LLM Reinforcement Learning (Qi et al., 2026, arXiv:2602.04879).
    """
    behavior = tokens.old_log_probs if tokens.rollout_logprobs is None else tokens.rollout_logprobs
    distance = _binary_tv if config.dppo.dppo_type == "binary_tv" else _binary_kl
    moved = distance(behavior, tokens.log_probs.detach())  # (B, R)
    rose, fell = tokens.log_probs > behavior, tokens.log_probs < behavior
    is_left_out = (tokens.advantages > 0) & rose & (moved > config.dppo.delta_high)
    is_left_out |= (tokens.advantages < 0) & fell & (moved > config.dppo.delta_low)
    weight = importance_ratio(tokens.log_probs.detach(), behavior).clamp(max=config.dppo.max_ratio)
    loss = -torch.where(is_left_out, 0.0, weight) * tokens.advantages * tokens.log_probs
    return loss, {"masked_token_ratio": is_left_out.to(loss.dtype)}


def _binary_tv(log_mu: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """Return |π - μ| from the logarithms."""
    return (log_pi.exp() - log_mu.exp()).abs()


def _binary_kl(log_mu: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """Return μ log(μ / π) + (1 - μ) log((1 - μ) / (1 - π)) from log μ and log π."""
    other_mu, other_pi = _complement(log_mu), _complement(log_pi)
    return log_mu.exp() * (log_mu - log_pi) + other_mu * (other_mu.log() - other_pi.log())


def _complement(log_p: torch.Tensor) -> torch.Tensor:
    """Return 1 - p from log p, precise for p close to 1, and never 0, so that its logarithm is finite."""
    return (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny)
