"""Policy gradients with a weight on each token."""

from __future__ import annotations

from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, importance_ratio, within_mask
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch


@register_policy_loss("policy_gradient", reads_eps_clip=False)
@within_mask
def policy_gradient(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute the plain policy gradient -A log π, without a correction for tokens of an older policy.

    All tensors (B, R), no metrics. With the estimator `gpg` this is Group Policy Gradient.

    Sources: Simple Statistical Gradient-Following Algorithms (Williams, 1992, Machine Learning 8). GPG (Chu et al.,
    2025, arXiv:2504.02546).
    """
    return -tokens.advantages * tokens.log_probs, {}


@register_policy_loss("cross_entropy", reads_eps_clip=False)
@within_mask
def cross_entropy(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -log π: imitate the tokens, whatever their advantages. All tensors (B, R), no metrics."""
    return -tokens.log_probs, {}


@register_policy_loss("importance_sampling", reads_eps_clip=False)
@within_mask
def importance_sampling(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -ρA with ρ = π / π_old, without a clip. All tensors (B, R). Metric `importance_ratio`: ρ.

    Source: Off-Policy Actor-Critic (Degris et al., 2012, arXiv:1205.4839).
    """
    return -tokens.ratio * tokens.advantages, {"importance_ratio": tokens.ratio.detach()}


@register_policy_loss("rollout_is", reads_rollout_logprobs=True, reads_eps_clip=False)
@within_mask
def rollout_is(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -sg(ρ) · A · log π with ρ = π / π_rollout, and 0 where ρ is outside [ratio_low, ratio_high].

    One ratio corrects for the updates since the rollout and for the gap between engine and trainer. All tensors (B, R).
    Metric `masked_token_ratio`: the fraction of dropped tokens.

    Source: IcePop, in Every Step Evolves (Ling Team, 2025, arXiv:2510.18855).

    Raises:
        ConfigError: the rollouts came without log-probs.
    """
    if tokens.rollout_logprobs is None:
        raise ConfigError(
            "trainer.algorithm.policy_loss_type=rollout_is needs the engine's log-probs, but the generator reports "
            "none; try importance_sampling, which uses the trainer's"
        )
    ratio = importance_ratio(tokens.log_probs.detach(), tokens.rollout_logprobs)
    is_left_out = (ratio < config.rollout_is.ratio_low) | (ratio > config.rollout_is.ratio_high)
    loss = -torch.where(is_left_out, 0.0, ratio) * tokens.advantages * tokens.log_probs
    return loss, {"masked_token_ratio": is_left_out.to(loss.dtype)}


@register_policy_loss("dppo", reads_rollout_logprobs=True, reads_eps_clip=False)
@within_mask
def dppo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -sg(min(ρ, max_ratio)) · A · log π with ρ = π / μ, and 0 for tokens outside the trust region.

    μ is the policy that sampled: the engine's probabilities, or the old ones if the engine reports none. A token is
    outside if A > 0, π > μ and D(μ, π) > delta_high, or if A < 0, π < μ and D(μ, π) > delta_low. D is a distance of two
    Bernoulli distributions, "this token or any other": |π - μ| for `binary_tv`, KL(μ || π) for `binary_kl`. Unlike
    PPO's ratio, D measures the change in probability. A token that goes from 0.001 to 0.002 stays (D = 0.001), but one
    that goes from 0.5 to 0.9 does not (D = 0.4).

    All tensors (B, R). Metric `masked_token_ratio`: the fraction of dropped tokens.

    Source: Rethinking the Trust Region in LLM Reinforcement Learning (Qi et al., 2026, arXiv:2602.04879).
    """
    log_mu = tokens.old_log_probs if tokens.rollout_logprobs is None else tokens.rollout_logprobs
    log_pi = tokens.log_probs.detach()
    if config.dppo.dppo_type == "binary_tv":
        moved = (log_pi.exp() - log_mu.exp()).abs()  # (B, R)
    else:
        # 1 - p from log p is precise for p close to 1, and never 0, so its logarithm is finite.
        tiny = torch.finfo(log_pi.dtype).tiny
        other_mu, other_pi = ((-torch.expm1(log_p)).clamp(min=tiny) for log_p in (log_mu, log_pi))
        moved = log_mu.exp() * (log_mu - log_pi) + other_mu * (other_mu.log() - other_pi.log())
    is_left_out = (tokens.advantages > 0) & (log_pi > log_mu) & (moved > config.dppo.delta_high)
    is_left_out |= (tokens.advantages < 0) & (log_pi < log_mu) & (moved > config.dppo.delta_low)
    weight = importance_ratio(log_pi, log_mu).clamp(max=config.dppo.max_ratio)
    loss = -torch.where(is_left_out, 0.0, weight) * tokens.advantages * tokens.log_probs
    return loss, {"masked_token_ratio": is_left_out.to(loss.dtype)}


@register_policy_loss("cispo", reads_eps_clip=False)
@within_mask
def cispo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -sg(clip(ρ, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)) · A · log π with ρ = π / π_old.

    Only the weight is clipped, so every token keeps a gradient, whereas PPO's clip would set it to 0. All tensors
    (B, R). Metric `ppo_clip_ratio`: the fraction of tokens whose weight is clipped.

    Source: MiniMax-M1 (MiniMax, 2025, arXiv:2506.13585), section 3.1.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high)
    loss = -weight * tokens.advantages * tokens.log_probs
    return loss, {"ppo_clip_ratio": (weight != ratio).to(loss.dtype)}


@register_policy_loss("sapo", reads_eps_clip=False, loss_reduction="sequence_mean")
@within_mask
def sapo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -(4 / τ) σ(τ(ρ - 1)) · A with ρ = π / π_old: a sigmoid instead of the clip.

    τ is `tau_pos` where A > 0, else `tau_neg`. All tensors (B, R). Metric `sapo_gate`: 4 σ (1 - σ), the factor on the
    gradient of -ρA. It is 1 on policy.

    Source: Soft Adaptive Policy Optimization (Gao et al., 2025, arXiv:2511.20347).
    """
    is_positive = tokens.advantages > 0
    tau = torch.full_like(tokens.ratio, config.sapo.tau_neg).masked_fill(is_positive, config.sapo.tau_pos)  # (B, R)
    gate = torch.sigmoid(tau * (tokens.ratio - 1))
    return -(4 / tau) * gate * tokens.advantages, {"sapo_gate": (4 * gate * (1 - gate)).detach()}


@register_policy_loss("dro", reads_eps_clip=False)
@within_mask
def dro(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -(A log π - β/2 · (log ρ)²) with ρ = π / π_old. A penalty takes the place of the clip.

    All tensors (B, R). Metric `dro_penalty`: β/2 · (log ρ)².

    Sources: Offline Regularized Reinforcement Learning (Richemond et al., 2024, arXiv:2405.19107). The form per token
    with any advantage is from Kimi k1.5 (Kimi Team, 2025, arXiv:2501.12599).
    """
    penalty = config.dro.beta / 2 * tokens.log_ratio.square()
    return -(tokens.log_probs * tokens.advantages - penalty), {"dro_penalty": penalty.detach()}
