"""Estimators that go by turns: one advantage for all tokens of a turn, from the rewards of that turn and later ones.

A turn is a run of sampled tokens between observations. B rows, R tokens of response, T turns of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from skyrl_train.algorithms.advantages.groups import Cells, on_sampled_tokens, prompt_groups
from skyrl_train.algorithms.masked import masked_whiten
from skyrl_train.algorithms.registry import register_advantage_estimator

Scaled = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def turn_index(response_mask: torch.Tensor) -> torch.Tensor:
    """The number of the turn that each token belongs to (B, R), from 0; -1 outside the mask.

    A turn is a run of consecutive 1s of `response_mask`.
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO turn by turn: A_k = (G_k - mean(G_k)) / (std(G_k) + 1e-6) among the group's trajectories with a turn k.

    G_k = r_k + γ G_{k+1} with r_k the rewards on the tokens of turn k, so that a turn answers for what follows it and
    not for what came before. A trajectory that is alone at a turn gets 0 there. `grpo_norm_by_std=false` leaves the
    division out. Returns are G.

    Source: Group Turn Policy Optimization (Ding et al., 2025, arXiv:2511.14846); turn-level credit for GRPO is from
    Zeng et al., 2025, arXiv:2505.11821.
    """
    turns = turn_index(response_mask)
    returns = _returns_to_go(token_level_rewards, turns, gamma)  # (B, T)
    advantages = _compare_turns(
        returns, turns, index, lambda centred, std, _: centred / (std + 1e-6) if grpo_norm_by_std else centred
    )
    return _on_tokens(advantages, turns), _on_tokens(returns, turns)


@register_advantage_estimator("rloo_per_turn", compares="parts", per_token=True, whitens=False)
def rloo_per_turn(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: list[str],
    gamma: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave-one-out turn by turn: A_k = (G_k - mean(G_k)) · n_k / (n_k - 1) among the n_k trajectories with a turn k.

    G_k = r_k + γ G_{k+1} with r_k the rewards on the tokens of turn k. A trajectory that is alone at a turn gets 0
    there. Returns are G.

    Source: the estimator of RLOO (Ahmadian et al., 2024, arXiv:2402.14740) on the turns of Zeng et al., 2025,
    arXiv:2505.11821.
    """
    turns = turn_index(response_mask)
    returns = _returns_to_go(token_level_rewards, turns, gamma)  # (B, T)
    advantages = _compare_turns(
        returns, turns, index, lambda centred, _, size: centred * size / (size - 1).clamp(min=1)
    )
    return _on_tokens(advantages, turns), _on_tokens(returns, turns)


@register_advantage_estimator("gae_per_turn", compares="baseline", per_token=True, whitens=True)
def gae_per_turn(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lambd: float = 1.0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over turns, whitened over the sampled tokens of the batch.

    V_k is the critic's value at the first token of turn k, where the turn's observation has been read, and 0 after
    the last turn: δ_k = r_k + γ V_{k+1} - V_k, A_k = δ_k + γλ A_{k+1}, with r_k the rewards on the tokens of turn k.
    All its tokens get A_k. Returns, what the critic learns, are V_k plus A_k before whitening.

    Source: Turn-PPO (Li et al., 2025, arXiv:2512.17008).
    """
    turns = turn_index(response_mask)
    rewards = _sum_by_turn(token_level_rewards, turns)  # (B, T)
    turn_values = _sum_by_turn(torch.where(_starts(response_mask > 0), values, 0.0), turns)  # (B, T)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])  # (B,)
    for k in reversed(range(rewards.shape[1])):  # a turn that a row does not reach has reward and value 0
        delta = rewards[:, k] + gamma * next_value - turn_values[:, k]
        next_value, next_advantage = turn_values[:, k], delta + gamma * lambd * next_advantage
        advantages[:, k] = next_advantage
    whitened = masked_whiten(_on_tokens(advantages, turns), response_mask)
    return whitened, _on_tokens(advantages + turn_values, turns)


def _returns_to_go(token_level_rewards: torch.Tensor, turns: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_k = r_k + γ G_{k+1} of each turn (B, T); 0 for a turn that a row does not reach."""
    rewards = _sum_by_turn(token_level_rewards, turns)  # (B, T)
    returns = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])  # (B,)
    for k in reversed(range(rewards.shape[1])):
        following = rewards[:, k] + gamma * following
        returns[:, k] = following
    return returns


def _compare_turns(returns: torch.Tensor, turns: torch.Tensor, index: list[str], scaled: Scaled) -> torch.Tensor:
    """Advantages (B, T) from the returns (B, T) of a group's trajectories at the same turn.

    `scaled` is given, for the N turns that were played, G_k less its mean, and its std and count (N,). The first is
    exactly 0 where a turn is alone or all are equal.
    """
    turn = torch.arange(returns.shape[1], device=turns.device)  # (T,)
    is_played = turn <= turns.amax(dim=-1, keepdim=True)  # (B, T)
    groups = prompt_groups(index, turns.device)
    same_turn = groups.cell[:, None] * len(turn) + turn  # (B, T)
    played = returns[is_played]  # (N,)
    mean, std, size = Cells(same_turn[is_played], groups.n_cells * len(turn)).statistics(played)
    advantages = torch.zeros_like(returns)
    advantages[is_played] = scaled(torch.where(std > 0, played - mean, 0.0), std, size)
    return advantages


def _starts(is_sampled: torch.Tensor) -> torch.Tensor:
    """Whether a token is the first of a turn (B, R)."""
    before = torch.nn.functional.pad(is_sampled[:, :-1], (1, 0))
    return is_sampled & ~before


def _sum_by_turn(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Σ of token values (B, R) over each turn (B, T)."""
    n_turns = max(int(turns.max()) + 1, 1)  # one without content where nothing was sampled
    totals = values.new_zeros(len(values), n_turns + 1)  # one more at the front, for tokens outside the mask
    return totals.scatter_add(1, turns + 1, values)[:, 1:]


def _on_tokens(per_turn: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Values of turns (B, T) on each of their tokens (B, R); 0 outside the mask."""
    return on_sampled_tokens(per_turn.gather(1, turns.clamp(min=0)), turns >= 0)
