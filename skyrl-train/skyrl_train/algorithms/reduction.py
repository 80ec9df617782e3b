"""Reduce a loss per token to one number, with the divisor of the whole mini-batch.

Weights are computed once, before the mini-batch is split. Every part then only sums `weights * loss`, so the result
does not depend on the number of micro-batches or ranks.

A row without a trained token (a truncated response, a group of equal rewards) counts in no divisor, so the loss is the
same as without the row. But tokens to which a correction gives weight 0 stay in the divisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.config.algorithm import LossReduction
from skyrl_train.errors import ConfigError
from skyrl_train.lazy import torch


def token_weights(
    loss_mask: torch.Tensor,
    reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[Any] | torch.Tensor | None = None,
    trajectories: Sequence[Any] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight (B, R) of each token's loss in the loss of a mini-batch, 0 outside the mask (B, R).

    T is the number of trained tokens in the mini-batch, T_i in row i's trajectory, and T_g in row i's prompt. N and P
    are the numbers of trajectories and prompts with a trained token.

    token_mean               1 / T: every token counts the same (DAPO, Yu et al., 2025, arXiv:2503.14476)
    sequence_mean            1 / (N · T_i): every trajectory counts the same (GRPO, Shao et al., 2024, arXiv:2402.03300)
    prompt_mean              1 / (P · T_g): every prompt counts the same, as does every token within a prompt
    seq_mean_token_sum_norm  1 / (N · max_seq_len): every token counts the same, whatever the lengths (Dr. GRPO, Liu et
                             al., 2025, arXiv:2503.20783)
    seq_mean_token_sum       1 / N
    token_sum                1

    `index` [B] names the prompt of each row, for prompt_mean. `trajectories` [B] names its trajectory. None means that
    every row is one.

    >>> loss_mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> token_weights(loss_mask, "token_mean")  # 1 / 4 each
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.0000, 0.0000]])
    >>> token_weights(loss_mask, "sequence_mean")  # half for each row, whatever its length
    tensor([[0.1667, 0.1667, 0.1667],
            [0.5000, 0.0000, 0.0000]])

    Raises:
        ConfigError: the reduction needs `max_seq_len` or `index`, or is unknown.
    """
    n_tokens = loss_mask.sum(dim=-1, keepdim=True)  # (B, 1)
    match reduction:
        case "token_mean":
            divisor = n_tokens.sum()
        case "sequence_mean":
            n_sequences, n_sequence_tokens = _group_tokens(n_tokens, trajectories)
            divisor = n_sequences * n_sequence_tokens
        case "prompt_mean":
            if index is None:
                raise ConfigError("loss reduction prompt_mean needs index, the prompt of each row")
            n_prompts, n_prompt_tokens = _group_tokens(n_tokens, index)
            divisor = n_prompts * n_prompt_tokens
        case "seq_mean_token_sum_norm":
            if max_seq_len is None:
                raise ConfigError("loss reduction seq_mean_token_sum_norm needs max_seq_len, the number to divide by")
            divisor = _group_tokens(n_tokens, trajectories)[0] * max_seq_len
        case "seq_mean_token_sum":
            divisor = _group_tokens(n_tokens, trajectories)[0]
        case "token_sum":
            divisor = torch.ones_like(n_tokens[:1])
        case _:
            raise ConfigError(f"unknown loss reduction {reduction!r}; config/algorithm.py lists the valid names")
    return loss_mask / divisor.clamp(min=1)


def _group_tokens(
    n_tokens: torch.Tensor, groups: Sequence[Any] | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of groups with a trained token, and the trained tokens (B, 1) of each row's group."""
    if groups is None:
        return (n_tokens > 0).sum(), n_tokens
    names = groups.tolist() if isinstance(groups, torch.Tensor) else groups
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group_of_row = torch.tensor([numbers[name] for name in names], device=n_tokens.device)
    totals = n_tokens.new_zeros(len(numbers), 1).index_add(0, group_of_row, n_tokens)
    return (totals > 0).sum(), totals[group_of_row]


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return Σ weights · values over (B, R). A NaN with weight 0 is ignored."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()
