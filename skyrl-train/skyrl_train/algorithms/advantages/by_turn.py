"""Estimators with one advantage per turn, from the rewards of that turn and later turns.

A turn is a run of sampled tokens between observations. Shapes: B rows, R response tokens, T turns in the longest row.
"""

from __future__ import annotations

from typing import Any

from skyrl_train.algorithms.advantages.by_token import generalized_advantages, reward_to_go
from skyrl_train.algorithms.advantages.groups import Cells, Estimate, on_sampled_tokens, prompt_groups
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator
from skyrl_train.lazy import torch


def turn_index(response_mask: torch.Tensor) -> torch.Tensor:
    """Return the index of each token's turn (B, R), from 0, or -1 outside the mask.

    >>> turn_index(torch.tensor([[1, 1, 0, 1, 0, 0]]))
    tensor([[ 0,  0, -1,  1, -1, -1]])
    """
    is_sampled = response_mask > 0
    return torch.where(is_sampled, _starts(is_sampled).cumsum(dim=-1) - 1, -1)


@register_advantage_estimator("grpo_per_turn", compares="parts", per_token=True, whitens=False)
def grpo_per_turn(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    gamma: float = 1.0,
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> Estimate:
    """Compute GRPO advantages per turn: A_k = (G_k - mean(G_k)) / (std(G_k) + 1e-6) over the group's turns k.

    G_k = r_k + γ G_{k+1}, where r_k is the sum of rewards on the tokens of turn k. So a turn gets no credit for earlier
    rewards. The only trajectory to reach turn k gets 0 there. `grpo_norm_by_std=false` omits the division. Returns are
    G.

    Two samples with two turns each. The first is paid after its first turn, the second after its last:

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    >>> mask = torch.tensor([[1, 0, 1], [1, 0, 1]])
    >>> advantages, returns = grpo_per_turn(rewards, mask, index=["a", "a"], grpo_norm_by_std=False)
    >>> returns
    tensor([[1., 0., 0.],
            [1., 0., 1.]])
    >>> advantages
    tensor([[ 0.0000,  0.0000, -0.5000],
            [ 0.0000,  0.0000,  0.5000]])

    Sources: Group Turn Policy Optimization (Ding et al., 2025, arXiv:2511.14846). Turn-level credit for GRPO is from
    Zeng et al., 2025, arXiv:2505.11821.
    """
    turns = turn_index(response_mask)
    returns, centred, std, _size = _compare_turns(token_level_rewards, turns, index, gamma)
    advantages = centred / (std + 1e-6) if grpo_norm_by_std else centred
    return _on_tokens(advantages, turns), _on_tokens(returns, turns)


@register_advantage_estimator("rloo_per_turn", compares="parts", per_token=True, whitens=False)
def rloo_per_turn(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: list[str], gamma: float = 1.0, **_: Any
) -> Estimate:
    """Compute leave-one-out advantages per turn: A_k = (G_k - mean(G_k)) · n / (n - 1) over the group's n turns k.

    G_k = r_k + γ G_{k+1}, where r_k is the sum of rewards on the tokens of turn k. The only trajectory to reach turn k
    gets 0 there. Returns are G.

    Source: the estimator of RLOO (Ahmadian et al., 2024, arXiv:2402.14740) on the turns of Zeng et al., 2025,
    arXiv:2505.11821.
    """
    turns = turn_index(response_mask)
    returns, centred, _std, size = _compare_turns(token_level_rewards, turns, index, gamma)
    return _on_tokens(centred * size / (size - 1).clamp(min=1), turns), _on_tokens(returns, turns)


@register_advantage_estimator("gae_per_turn", compares="baseline", per_token=True, whitens=True)
def gae_per_turn(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: Any,
) -> Estimate:
    """Compute generalized advantage estimates over turns, whitened over the sampled tokens of the batch.

    δ_k = r_k + γ V_{k+1} - V_k and A_k = δ_k + γλ A_{k+1}, where r_k is the sum of rewards on the tokens of turn k. V_k
    is the critic's value at the first token of turn k, and 0 after the last turn. All tokens of the turn get A_k.
    Returns, the critic's targets, are V_k + A_k before whitening.

    Source: Turn-PPO (Li et al., 2025, arXiv:2512.17008).
    """
    turns = turn_index(response_mask)
    rewards = _sum_by_turn(token_level_rewards, turns)  # (B, T)
    turn_values = _sum_by_turn(torch.where(_starts(response_mask > 0), values, 0.0), turns)  # (B, T)
    advantages = generalized_advantages(rewards, turn_values, torch.ones_like(rewards), gamma, lambd)
    whitened = masked_whiten(_on_tokens(advantages, turns), response_mask)
    return whitened, _on_tokens(advantages + turn_values, turns)


def _compare_turns(
    token_level_rewards: torch.Tensor, turns: torch.Tensor, index: list[str], gamma: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare each turn with the turns of the same index in its group.

    Returns:
        G_k, G_k minus the mean of the group's turns k, their std, and their number, all (B, T). The difference is
        exactly 0 for a turn that is alone or if all are equal. Turns that a row does not reach hold 0, with number 1.
    """
    rewards = _sum_by_turn(token_level_rewards, turns)  # (B, T)
    returns = reward_to_go(rewards, torch.ones_like(rewards), gamma)
    turn = torch.arange(returns.shape[1], device=turns.device)  # (T,)
    is_played = turn <= turns.amax(dim=-1, keepdim=True)  # (B, T)
    groups = prompt_groups(index, turns.device)
    same_turn = groups.cell[:, None] * len(turn) + turn  # (B, T)
    played = returns[is_played]  # (N,)
    mean, std, size = Cells(same_turn[is_played], groups.n_cells * len(turn)).statistics(played)
    stds, sizes, centred = torch.zeros_like(returns), torch.ones_like(returns), torch.zeros_like(returns)
    stds[is_played], sizes[is_played] = std, size
    centred[is_played] = torch.where(std > 0, played - mean, 0.0)
    return returns, centred, stds, sizes


def _starts(is_sampled: torch.Tensor) -> torch.Tensor:
    """Mark the first token of each turn (B, R)."""
    before = torch.nn.functional.pad(is_sampled[:, :-1], (1, 0))
    return is_sampled & ~before


def _sum_by_turn(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return Σ of token values (B, R) over each turn (B, T)."""
    n_turns = max(int(turns.max()) + 1, 1)  # one empty turn if nothing was sampled
    totals = values.new_zeros(len(values), n_turns + 1)  # column 0 collects tokens outside the mask
    return totals.scatter_add(1, turns + 1, values)[:, 1:]


def _on_tokens(per_turn: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return values of turns (B, T) on each of their tokens (B, R), 0 outside the mask."""
    return on_sampled_tokens(per_turn.gather(1, turns.clamp(min=0)), turns >= 0)
