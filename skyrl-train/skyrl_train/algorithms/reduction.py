"""Reduction of a loss per token to one number, with the divisor of the whole mini-batch.

The weights are computed once, before the mini-batch is split; every part then only sums `weights * loss`. So the result
does not depend on the number of micro-batches or ranks.

A row without a trained token (a truncated response, a group of equal rewards) is in no divisor: its mini-batch has the
loss of one without the row. Tokens that a correction of the loss weighs with zero stay in the divisor.
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
    """Return the weight (B, R) of each token's loss in the loss of a mini-batch; zero outside the mask (B, R).

    With T the trained tokens of the mini-batch, T_i those of the trajectory of row i, N the trajectories that have
    some, T_g those of the prompt of row i, and P the prompts that have some:

    token_mean               1 / T: every token counts the same (DAPO, Yu et al., 2025, arXiv:2503.14476)
    sequence_mean            1 / (N · T_i): every trajectory counts the same (GRPO, Shao et al., 2024, arXiv:2402.03300)
    prompt_mean              1 / (P · T_g): every prompt counts the same, and so does every token of its trajectories
    seq_mean_token_sum_norm  1 / (N · max_seq_len): every token counts the same, whatever the lengths (Dr. GRPO, Liu et
                             al., 2025, arXiv:2503.20783)
    seq_mean_token_sum       1 / N
    token_sum                1

    `index` [B] names the prompt of each row, which only prompt_mean reads; `trajectories` [B] its trajectory, None if
    each row is one.

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
    """Return Σ weights · values over (B, R); a NaN with weight 0 is ignored."""
    return (torch.where(weights > 0, values, 0.0) * weights).sum()


def reduce_loss(
    loss: torch.Tensor,
    loss_mask: torch.Tensor | None,
    loss_reduction: LossReduction,
    max_seq_len: int | None = None,
    index: Sequence[str] | None = None,
) -> torch.Tensor:
    """Return `weighted_sum` of a loss per token (B, R) with `token_weights`. No mask is a mask of ones.

    For custom policy losses that return a scalar. The divisor is that of the given rows: on micro-batches, the result
    is a mean of means. A loss that returns one value per token is reduced over the whole mini-batch.

    Raises:
        ConfigError: the reduction needs `max_seq_len` or `index`, or is unknown.
    """
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    return weighted_sum(loss, token_weights(mask, loss_reduction, max_seq_len, index))
