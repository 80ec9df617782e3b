"""Estimators with one advantage per token, from later rewards or from the token itself.

Each sampled token is a time step. Observation tokens are not: they add no discount, and rewards on them are ignored.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.algorithms.advantages.groups import Cells, Estimate, on_sampled_tokens, prompt_groups
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.lazy import torch


@register_advantage_estimator("reinforce++", compares="baseline", per_token=True, whitens=True)
def reinforce_plus_plus(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float = 1.0, **_: Any
) -> Estimate:
    """Compute REINFORCE++ advantages: G_t = r_t + γ G_{t+1}, whitened over the sampled tokens of the batch.

    The batch is the only baseline, so one sample per prompt is enough. Returns are the rewards-to-go G.

    Source: REINFORCE++ (Hu et al., 2025, arXiv:2501.03262).
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma)  # (B, R)
    return masked_whiten(returns, response_mask), returns


@register_advantage_estimator("gae", compares="baseline", per_token=True, whitens=True)
def gae(
    token_level_rewards: torch.Tensor,
    *,
    response_mask: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: Any,
) -> Estimate:
    """Compute generalized advantage estimates, whitened over the sampled tokens of the batch.

    δ_t = r_t + γ V_{t+1} - V_t and A_t = δ_t + γλ A_{t+1}, where t + 1 is the next sampled token, V (B, R) are the
    critic's values, and V = 0 after the end. Returns, the critic's targets, are V + A before whitening.

    The last token earns the reward 1. The column in the middle is an observation, so its value does not count:

    >>> rewards, mask = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]])
    >>> values = torch.tensor([[0.5, 9.0, 0.8]])
    >>> advantages, returns = gae(rewards, response_mask=mask, values=values, gamma=1.0, lambd=0.0)
    >>> returns  # with λ = 0: r_t + V_{t+1}
    tensor([[0.8000, 0.0000, 1.0000]])

    Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation (Schulman et al., 2015,
    arXiv:1506.02438).
    """
    advantages = generalized_advantages(token_level_rewards, values, response_mask, gamma, lambd)
    return masked_whiten(advantages, response_mask), on_sampled_tokens(advantages + values, response_mask)


@register_advantage_estimator("remax", compares="baseline", per_token=True, whitens=False)
def remax(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    greedy_rewards: torch.Tensor,
    gamma: float = 1.0,
    **_: Any,
) -> Estimate:
    """Compute ReMax advantages: A_t = G_t - b, where b is the reward of a greedy rollout of the same prompt.

    G_t = r_t + γ G_{t+1}, and b is `greedy_rewards` (B,), the total of one more rollout at temperature 0. Returns are
    G.

    Source: ReMax (Li et al., 2023, arXiv:2310.10505).
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma)  # (B, R)
    return on_sampled_tokens(returns - greedy_rewards[:, None], response_mask), returns


@register_advantage_estimator("optimal_token_baseline", compares="parts", per_token=True, whitens=False)
def optimal_token_baseline(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    old_log_probs: torch.Tensor,
    sum_pi_squared: torch.Tensor,
    gamma: float = 1.0,
    **_: Any,
) -> Estimate:
    """Subtract the optimal token baseline: A_t = G_t - B_t, with B_t = Σ_group G_t W_t / Σ_group W_t per position.

    G_t = r_t + γ G_{t+1} is the reward-to-go. To minimize the variance, W_t is the squared norm of the gradient of the
    log-probs up to t with respect to the logits: the sum over tokens s ≤ t of 1 - 2 π_s + Σ_v π_s(v)², where π_s is the
    probability of the sampled token s, and Σ_v π_s(v)² is `sum_pi_squared` (B, R).

    Position t is the t-th sampled token, so observations of unequal length do not misalign later turns. B_t compares
    the trajectories that reach t. With only one, or if all G_t are equal, the advantage is exactly 0. If all tokens up
    to t were certain (W = 0), trajectories have equal weights. Returns are G.

    Source: The Optimal Token Baseline (Li et al., 2026, arXiv:2602.07078).
    """
    is_sampled = response_mask > 0  # (B, R)
    returns = reward_to_go(token_level_rewards, response_mask, gamma)
    energy = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    weights = on_sampled_tokens(energy, response_mask).cumsum(dim=-1) + 1e-8
    # A cell holds the tokens of a group at one position, for each of the N sampled tokens.
    groups, length = prompt_groups(index, returns.device), returns.shape[1]
    cell = groups.cell[:, None] * length + is_sampled.cumsum(dim=-1) - 1  # (B, R)
    positions = Cells(cell[is_sampled], groups.n_cells * length)
    reached = returns[is_sampled]  # (N,)
    _mean, std, _size = positions.statistics(reached)
    baseline = positions.weighted_mean(reached, weights[is_sampled])
    advantages = torch.zeros_like(returns)
    advantages[is_sampled] = torch.where(std > 0, reached - baseline, 0.0)
    return advantages, returns


@register_advantage_estimator("on_policy_distillation", compares="nothing", per_token=True, whitens=False)
def on_policy_distillation(
    response_mask: torch.Tensor, old_log_probs: torch.Tensor, ref_log_probs: torch.Tensor, **_: Any
) -> Estimate:
    """Compute distillation advantages: A_t = log π_teacher - log π_old of each sampled token.

    The teacher is the reference model, and rewards are ignored. On the policy's own samples, the mean of -A is the
    reverse KL divergence to the teacher. There is no discount, because each token is graded separately.

    Sources: On-Policy Distillation (Lu and Thinking Machines Lab, 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation). GKD (Agarwal et al., 2023, arXiv:2306.13649).
    """
    advantages = on_sampled_tokens(ref_log_probs - old_log_probs, response_mask)  # (B, R)
    return advantages, advantages


@register_advantage_estimator("token_rewards", compares="nothing", per_token=True, whitens=False)
def token_rewards(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any) -> Estimate:
    """Use the rewards as advantages: A_t = r_t, for an environment or a reward model that returns advantages."""
    advantages = on_sampled_tokens(token_level_rewards, response_mask)  # (B, R)
    return advantages, advantages


def reward_to_go(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return G_t = r_t + γ G_{t+1} (B, R), where t + 1 is the next sampled token, and 0 outside the mask.

    >>> reward_to_go(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[1, 0, 1]]), gamma=0.5)
    tensor([[0.5000, 0.0000, 1.0000]])
    """
    no_values = torch.zeros_like(token_level_rewards)
    returns = generalized_advantages(token_level_rewards, no_values, response_mask, gamma, lambd=1.0)
    return on_sampled_tokens(returns, response_mask)


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lambd: float
) -> torch.Tensor:
    """Return A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t (B, R), where t + 1 is the next step in the mask.

    Results outside the mask are meaningless.
    """
    is_step = mask > 0
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (B,)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = delta + gamma * lambd * next_advantage
        next_value = torch.where(is_step[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_step[:, t], advantages[:, t], next_advantage)
    return advantages
