"""Policy gradients with a weight on each token."""

from __future__ import annotations

import torch

from skyrl_train.algorithms.losses.masking import LossOutput, within_mask
from skyrl_train.algorithms.losses.ratio import importance_ratio
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.errors import ConfigError


@register_policy_loss("policy_gradient")
@within_mask
def policy_gradient(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """The plain policy gradient: -A log π, without correction for what was sampled by an older policy.

    All tensors (B, R); no metrics. With the estimator `gpg` this is Group Policy Gradient.

    Source: Simple Statistical Gradient-Following Algorithms (Williams, 1992, Machine Learning 8); GPG (Chu et al.,
    2025, arXiv:2504.02546).
    """
    return -advantages * log_probs, {}


@register_policy_loss("cross_entropy")
@within_mask
def cross_entropy(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-log π: imitate the tokens, whatever their advantages. All tensors (B, R); no metrics."""
    return -log_probs, {}


@register_policy_loss("importance_sampling")
@within_mask
def importance_sampling(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-ρA with ρ = π / π_old and no clip at all. All tensors (B, R). Metric `importance_ratio`: ρ.

    Source: Off-Policy Actor-Critic (Degris et al., 2012, arXiv:1205.4839).
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    return -ratio * advantages, {"importance_ratio": ratio.detach()}


@register_policy_loss("rollout_is")
@within_mask
def rollout_is(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-sg(ρ) · A · log π with ρ = π / π_rollout, and 0 where ρ is outside of [ratio_low, ratio_high].

    One ratio corrects both for updates since the rollout and for an engine that computes other probabilities than the
    trainer. All tensors (B, R). Metric `masked_token_ratio`: the share of tokens left out.

    Source: IcePop, in Every Step Evolves (Ling Team, 2025, arXiv:2510.18855).

    Raises:
        ConfigError: the rollouts came without log-probs.
    """
    if rollout_logprobs is None:
        raise ConfigError(
            "trainer.algorithm.policy_loss_type=rollout_is needs the log-probs of the engine, and the generator "
            "reports none; try importance_sampling, which takes those of the trainer"
        )
    ratio = importance_ratio(log_probs.detach(), rollout_logprobs)
    is_left_out = (ratio < config.rollout_is.ratio_low) | (ratio > config.rollout_is.ratio_high)
    loss = -torch.where(is_left_out, 0.0, ratio) * advantages * log_probs
    return loss, {"masked_token_ratio": is_left_out.to(loss.dtype)}


@register_policy_loss("cispo")
@within_mask
def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-sg(clip(ρ, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)) · A · log π with ρ = π / π_old.

    The weight is clipped, not the update: every token keeps a gradient. All tensors (B, R). Metric `ppo_clip_ratio`:
    the share of tokens whose weight is clipped.

    Source: MiniMax-M1 (MiniMax, 2025, arXiv:2506.13585), section 3.1.
    """
    ratio = importance_ratio(log_probs.detach(), old_log_probs)
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high)
    return -weight * advantages * log_probs, {"ppo_clip_ratio": (weight != ratio).to(log_probs.dtype)}


@register_policy_loss("sapo")
@within_mask
def sapo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-(4 / τ) σ(τ(ρ - 1)) · A with ρ = π / π_old: a sigmoid in the place of the clip.

    τ is `tau_pos` where A > 0, else `tau_neg`. All tensors (B, R). Metric `sapo_gate`: 4 σ (1 - σ), the share of the
    gradient of -ρA that is let through; 1 on policy.

    Source: Soft Adaptive Policy Optimization (Gao et al., 2025, arXiv:2511.20347).
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = torch.full_like(advantages, config.sapo.tau_neg).masked_fill(advantages > 0, config.sapo.tau_pos)  # (B, R)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -(4 / tau) * gate * advantages, {"sapo_gate": (4 * gate * (1 - gate)).detach()}


@register_policy_loss("dro")
@within_mask
def dro(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor,
    rollout_logprobs: torch.Tensor | None,
) -> LossOutput:
    """-(A log π - β/2 · (log ρ)²) with ρ = π / π_old: a spring to the old policy in the place of a clip.

    All tensors (B, R). Metric `dro_penalty`: β/2 · (log ρ)².

    Source: Offline Regularised Reinforcement Learning (Richemond et al., 2024, arXiv:2405.19107); per token, with any
    advantage, Kimi k1.5 (Kimi Team, 2025, arXiv:2501.12599).
    """
    penalty = config.dro.beta / 2 * (log_probs - old_log_probs).square()
    return -(log_probs * advantages - penalty), {"dro_penalty": penalty.detach()}
