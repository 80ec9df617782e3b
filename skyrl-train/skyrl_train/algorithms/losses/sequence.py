"""Policy losses with one ratio for all tokens of a trajectory.

If a trajectory has several rows, each row has its own ratio, and in `luspo` its own length, because the rows may be on
different ranks.
"""

from __future__ import annotations

from skyrl_train.algorithms.losses.clipped import pessimistic_surrogate
from skyrl_train.algorithms.losses.masking import LossOutput, Tokens, within_mask
from skyrl_train.algorithms.masked import masked_mean
from skyrl_train.algorithms.registry import register_policy_loss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.lazy import torch


@register_policy_loss("gspo_token", loss_reduction="sequence_mean")
@register_policy_loss("gspo", loss_reduction="sequence_mean")
@within_mask
def gspo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Apply PPO's clip to the ratio of each row, s = exp(mean_t log(π / π_old)): -min(s_t A, clip(s_t) A).

    s_t = sg(s) · π / sg(π), where sg(x) is x detached, has the value of s and the gradient of its own token. This is
    the paper's GSPO-token. If all tokens have the same advantage, their mean has the value and the gradient of the
    paper's GSPO, -min(sA, clip(s) A), so one function has both names.

    Of two tokens, one has become twice as likely and one half as likely. Their geometric mean did not change:

    >>> log_probs = torch.tensor([[2.0, 0.5]]).log()
    >>> loss, _ = gspo(log_probs, torch.zeros(1, 2), torch.ones(1, 2), AlgorithmConfig())
    >>> loss
    tensor([[-1., -1.]])

    All tensors (B, R). The paper uses `loss_reduction=sequence_mean` and a narrow clip, 3e-4 below and 4e-4 above.
    Metric `ppo_clip_ratio`: the fraction of tokens in clipped rows.

    Source: Group Sequence Policy Optimization (Zheng et al., 2025, arXiv:2507.18071), sections 4.1 and 4.3.
    """
    mean_log_ratio = masked_mean(tokens.log_ratio.detach(), tokens.mask, dim=-1)[:, None]  # (B, 1)
    log_s = mean_log_ratio + (tokens.log_probs - tokens.log_probs.detach())  # (B, R)
    ratio = log_s.clamp(max=10).exp()
    loss, is_clipped = pessimistic_surrogate(ratio, tokens.advantages, config)
    return loss, {"ppo_clip_ratio": is_clipped.to(loss.dtype)}


@register_policy_loss("luspo", per_sequence=True, loss_reduction="sequence_mean")
@within_mask
def luspo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute GSPO's loss times the length of the trajectory, to remove the bias against long trajectories.

    The ratio is GSPO's length-normalized s. All tensors (B, R), with one advantage per trajectory. Use
    `loss_reduction=sequence_mean`, because `token_mean` would weight by length a second time. Metric as in `gspo`.

    Source: Length-Unbiased Sequence Policy Optimization (Liu et al., 2026, arXiv:2602.05261).
    """
    ratio = sequence_ratio(tokens.log_ratio, tokens.mask)  # (B, 1)
    loss, is_clipped = pessimistic_surrogate(ratio, tokens.advantages, config)
    n_tokens = (tokens.mask > 0).sum(dim=-1, keepdim=True)  # (B, 1)
    return n_tokens * loss, {"ppo_clip_ratio": is_clipped.to(loss.dtype)}


@register_policy_loss("gmpo", per_sequence=True, reads_eps_clip=False, loss_reduction="sequence_mean")
@within_mask
def gmpo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -A · exp(mean_t l_t), the geometric mean of ratios that are first clipped on the side A pushes them to.

    l_t = min(log ρ_t, c) where A > 0, max(log ρ_t, -c) where A < 0, with c = gmpo.log_ratio_clip. All tensors (B, R),
    with one advantage per trajectory and `loss_reduction=sequence_mean`. Metric `ppo_clip_ratio`: the fraction of
    clipped tokens. Unlike in `gspo`, the rest of their trajectory keeps its gradient.

    Source: Geometric-Mean Policy Optimization (Zhao et al., 2025, arXiv:2507.20673).
    """
    bound = config.gmpo.log_ratio_clip
    clipped = torch.where(tokens.advantages < 0, tokens.log_ratio.clamp(min=-bound), tokens.log_ratio.clamp(max=bound))
    loss = -sequence_ratio(clipped, tokens.mask) * tokens.advantages
    return loss, {"ppo_clip_ratio": (clipped != tokens.log_ratio).to(loss.dtype)}


@register_policy_loss("vespo", per_sequence=True, reads_eps_clip=False)
@within_mask
def vespo(tokens: Tokens, config: AlgorithmConfig) -> LossOutput:
    """Compute -φ(w) · A · log π with φ(w) = w^k e^(λ(1 - w)), detached, for the trajectory's full ratio w = Π_t ρ_t.

    k and λ are `k_pos`, `lambda_pos` where A ≥ 0, else `k_neg`, `lambda_neg`. φ is 1 on policy, largest at w = k / λ,
    and approaches 0 as w goes to 0 or infinity. All tensors (B, R). Metric `vespo_weight`: φ.

    Source: Variational Sequence-Level Soft Policy Optimization (Shen et al., 2026, arXiv:2602.10693).
    """
    settings = config.vespo
    log_w = tokens.log_ratio.detach().sum(dim=-1, keepdim=True)  # (B, 1)
    is_positive = tokens.advantages >= 0
    k = torch.full_like(tokens.advantages, settings.k_neg).masked_fill(is_positive, settings.k_pos)  # (B, R)
    lambd = torch.full_like(tokens.advantages, settings.lambda_neg).masked_fill(is_positive, settings.lambda_pos)
    # If w overflows to infinity, φ becomes e^-inf = 0, its limit.
    phi = (lambd + k * log_w - lambd * log_w.exp()).exp()  # (B, R)
    return -phi * tokens.advantages * tokens.log_probs, {"vespo_weight": phi}


def sequence_ratio(log_ratio: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the geometric mean (B, 1) of the ratios of each row's trained tokens, from their logarithms (B, R).

    It is 1 for a row without a trained token. The exponent is clamped to 10 so that no ratio overflows.

    Source: GSPO (Zheng et al., 2025, arXiv:2507.18071), section 4.1.
    """
    return masked_mean(log_ratio, loss_mask, dim=-1)[:, None].clamp(max=10).exp()
