"""Scores of chosen tokens from a linear head, block by block: logits never leave the processor's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from skyrl_train.types import TokenScores

CPU_BLOCK = (2048, 256)
"""Positions and tokens of the vocabulary in a block: 2 MiB of logits, which stay in the caches of the cores."""
GPU_BLOCK = (8192, 4096)
"""The block on a GPU, where few large operations are fastest: 128 MiB of logits."""


def linear_head_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    scale: float,
    *,
    entropy_grad: bool,
    group: dist.ProcessGroup | None = None,
) -> TokenScores:
    """Return the scores (N,) of `token_ids` under softmax(scale · (hidden · weightᵀ + bias)), in float32.

    `hidden` is (N, H), `weight` (V, H), `bias` (V,). The backward pass computes the logits again; the gradients are
    exact. Memory is two blocks of logits. Only `entropy_grad` makes entropies differentiable. Σπ² is 0 where gradients
    are recorded, since only scores before an update are read.

    With `group`, whose ranks divide the vocabulary, `weight` and `bias` are those of this rank's tokens, and
    `token_ids` count from the first of them: other ranks have the ids outside of [0, V). Scores are those of the whole
    vocabulary on every rank; the gradient of `hidden` is this rank's share of it.
    """
    with_sum_pi_squared = not torch.is_grad_enabled()
    return TokenScores(
        *_LinearHeadScores.apply(hidden, weight, bias, token_ids, scale, entropy_grad, with_sum_pi_squared, group)
    )


class _LinearHeadScores(torch.autograd.Function):
    """The running softmax of flash attention, with the vocabulary in place of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        token_ids: torch.Tensor,
        scale: float,
        entropy_grad: bool,
        with_sum_pi_squared: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lowest = torch.finfo(torch.float32).min
        highest = hidden.new_full((len(hidden),), lowest, dtype=torch.float32)  # (N,): largest logit so far
        # Over the tokens so far, with z = logit - highest: Σ e^z, Σ z · e^z, Σ e^2z.
        total, moment, squares = (torch.zeros_like(highest) for _ in range(3))
        scratch = hidden.new_empty(0, dtype=torch.float32)
        for rows, _, _, logits in _blocks(hidden, weight, bias, scale):
            new_highest = torch.maximum(highest[rows], logits.amax(dim=1))
            shift = highest[rows] - new_highest  # ≤ 0
            shrink = shift.exp()
            highest[rows] = new_highest
            logits.sub_(new_highest[:, None])
            if len(scratch) < logits.numel():  # the first block is the largest
                scratch = torch.empty_like(logits).flatten()
            powers = torch.exp(logits, out=scratch[: logits.numel()].view_as(logits))
            moment[rows] = shrink * (moment[rows] + shift * total[rows]) + logits.mul_(powers).sum(dim=1)
            total[rows] = shrink * total[rows] + powers.sum(dim=1)
            if with_sum_pi_squared:
                squares[rows] = shrink.square() * squares[rows] + powers.square_().sum(dim=1)
        is_own = (token_ids >= 0) & (token_ids < len(weight))
        token_ids = token_ids.clamp(0, len(weight) - 1)
        chosen = (hidden.float() * weight[token_ids].float()).sum(dim=1)
        if bias is not None:
            chosen += bias[token_ids].float()
        chosen = torch.where(is_own, scale * chosen, 0.0)
        if group is not None:
            own_highest = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            shift = own_highest - highest  # ≤ 0
            shrink = shift.exp()
            sums = torch.stack((chosen, shrink * total, shrink * (moment + shift * total), shrink.square() * squares))
            dist.all_reduce(sums, group=group)
            chosen, total, moment, squares = sums.unbind()
        log_total = total.log()
        entropy = log_total - moment / total
        log_normalizer = highest + log_total
        ctx.save_for_backward(hidden, weight, bias, token_ids, is_own, log_normalizer, entropy)
        ctx.scale = scale
        sum_pi_squared = squares / total.square()
        ctx.mark_non_differentiable(sum_pi_squared, *(() if entropy_grad else (entropy,)))
        ctx.set_materialize_grads(False)
        logprobs = (chosen - log_normalizer).clamp(max=0)  # the two sums round differently
        return logprobs, entropy, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, token_ids, is_own, log_normalizer, entropy = ctx.saved_tensors
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(log_normalizer)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        # With y the chosen token and g its gradient, ∂ log π(y) / ∂ logits = [y] - π: the blocks add π, whose factor -g
        # is that of a row and thus applied to hidden states. ∂ H / ∂ logits = -π · (log π + H) differs within a row.
        factor = ctx.scale * (-logprob_grad if entropy_grad is None else torch.ones_like(logprob_grad))  # (N,)
        scaled_hidden = hidden.float() * factor[:, None]
        for rows, tokens, block_weight, logprobs in _blocks(hidden, weight, bias, ctx.scale, -log_normalizer):
            if entropy_grad is None:
                grad = logprobs.exp_()
            else:
                probs = logprobs.exp()
                by_entropy = entropy_grad[rows, None]
                grad = logprobs.add_(entropy[rows, None]).mul_(-by_entropy).sub_(logprob_grad[rows, None]).mul_(probs)
            if hidden_grad is not None:
                hidden_grad[rows].addmm_(grad, block_weight)
            if weight_grad is not None:
                weight_grad[tokens].addmm_(grad.T, scaled_hidden[rows])
            if bias_grad is not None:
                bias_grad[tokens].addmv_(grad.T, factor[rows])
        chosen_grad = torch.where(is_own, ctx.scale * logprob_grad, 0.0)
        if hidden_grad is not None:
            hidden_grad.mul_(factor[:, None]).addcmul_(chosen_grad[:, None], weight[token_ids].float())
        if weight_grad is not None:
            weight_grad.index_add_(0, token_ids, chosen_grad[:, None] * hidden.float())
        if bias_grad is not None:
            bias_grad.index_add_(0, token_ids, chosen_grad)
        gradients = zip((hidden_grad, weight_grad, bias_grad), (hidden, weight, bias), strict=True)
        return (*(None if grad is None else grad.to(of.dtype) for grad, of in gradients), *(None,) * 5)


def _blocks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    offset: torch.Tensor | None = None,
) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
    """Yield positions, tokens, their weight (v, H), and their float32 logits (n, v) plus the `offset` (N,) of their
    position. The caller may overwrite the logits.
    """
    n_positions, n_tokens = len(hidden), len(weight)
    row_step, token_step = CPU_BLOCK if hidden.device.type == "cpu" else GPU_BLOCK
    buffer = torch.empty(min(row_step, n_positions) * min(token_step, n_tokens), device=hidden.device)
    # One matrix product multiplies by the scale and adds the offset and the bias, as columns of either side.
    columns = [scale * hidden.float()]
    if offset is not None:
        columns.append(offset[:, None])
    if bias is not None:
        columns.append(torch.full_like(columns[0][:, :1], scale))
    left = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
    for start in range(0, n_tokens, token_step):
        tokens = slice(start, min(start + token_step, n_tokens))
        block_weight = weight[tokens].float()
        columns = [block_weight]
        if offset is not None:
            columns.append(torch.ones_like(block_weight[:, :1]))
        if bias is not None:
            columns.append(bias[tokens, None].float())
        right = torch.cat(columns, dim=1) if len(columns) > 1 else block_weight
        for row in range(0, n_positions, row_step):
            rows = slice(row, min(row + row_step, n_positions))
            shape = (rows.stop - rows.start, tokens.stop - tokens.start)
            logits = buffer[: shape[0] * shape[1]].view(shape)
            torch.mm(left[rows], right.T, out=logits)
            yield rows, tokens, block_weight, logits
