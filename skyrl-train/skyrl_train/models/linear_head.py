"""Scores of chosen tokens from a linear head, computed in blocks of logits that fit in the processor's caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from skyrl_train.types import TokenScores

CPU_BLOCK = (2048, 1024)
"""Positions and tokens of the vocabulary in a block: 8 MiB of logits, which stay in the last-level cache."""
GPU_BLOCK = (8192, 4096)
"""The block on a GPU, where few large operations are fastest: 128 MiB of logits."""
MAX_SAVED_BYTES = 1 << 30
"""Maximum size of the exponentials that a forward pass on a CPU saves for the backward pass, which recomputes the rest.

On a GPU, where memory is scarcer than arithmetic, none are saved."""


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

    `hidden` is (N, H), `weight` (V, H), `bias` (V,). The gradients are exact. Memory is two blocks of logits, and on a
    CPU up to `MAX_SAVED_BYTES` between the passes. Only `entropy_grad` makes entropies differentiable. Σπ² is 0 where
    gradients are recorded, since only scores before an update are read.

    With `group`, whose ranks divide the vocabulary, `weight` and `bias` are those of this rank's tokens, and
    `token_ids` count from the first of them: other ranks have the ids outside of [0, V). Scores are those of the whole
    vocabulary on every rank; the gradient of `hidden` is this rank's share of it.
    """
    is_update = torch.is_grad_enabled()
    return TokenScores(*_LinearHeadScores.apply(hidden, weight, bias, token_ids, scale, entropy_grad, is_update, group))


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
        is_update: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lowest = torch.finfo(torch.float32).min
        highest = hidden.new_full((len(hidden),), lowest, dtype=torch.float32)  # (N,): largest logit so far
        chosen = torch.zeros_like(highest)
        # Over the tokens so far, with z = logit - highest: Σ e^z, Σ z · e^z, Σ e^2z.
        total, moment, squares = (torch.zeros_like(highest) for _ in range(3))
        scratch = torch.empty_like(highest[:0])
        can_save = is_update and not entropy_grad and hidden.device.type == "cpu"
        n_saved_tokens = MAX_SAVED_BYTES // (4 * max(len(hidden), 1)) if can_save else 0
        saved = []  # e^z and `highest` of each block of these tokens
        for rows, tokens, buffer in _blocks(hidden, weight):
            logits = _compute_logits(hidden, weight, bias, scale, rows, tokens, out=buffer)
            is_inside, columns = _find(token_ids[rows], tokens)
            chosen[rows] = torch.where(is_inside, logits.gather(1, columns)[:, 0], chosen[rows])

            new_highest = torch.maximum(highest[rows], logits.amax(dim=1))
            shift = highest[rows] - new_highest  # ≤ 0
            shrink = shift.exp()
            highest[rows] = new_highest
            logits.sub_(new_highest[:, None])
            if tokens.stop <= n_saved_tokens:
                powers = torch.exp(logits)
                saved += [powers, new_highest]
            else:
                if len(scratch) < logits.numel():
                    scratch = torch.empty_like(logits).flatten()
                powers = torch.exp(logits, out=scratch[: logits.numel()].view_as(logits))
            moment[rows] = shrink * (moment[rows] + shift * total[rows]) + logits.mul_(powers).sum(dim=1)
            total[rows] = shrink * total[rows] + powers.sum(dim=1)
            if not is_update:
                squares[rows] = shrink.square() * squares[rows] + powers.square_().sum(dim=1)
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
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_normalizer, entropy, *saved)
        ctx.scale = scale
        sum_pi_squared = squares / total.square()
        ctx.mark_non_differentiable(sum_pi_squared, *(() if entropy_grad else (entropy,)))
        ctx.set_materialize_grads(False)
        return chosen - log_normalizer, entropy, sum_pi_squared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, logprob_grad: torch.Tensor | None, entropy_grad: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, token_ids, log_normalizer, entropy, *saved = ctx.saved_tensors
        if logprob_grad is None:
            logprob_grad = torch.zeros_like(log_normalizer)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        saved_blocks = zip(saved[::2], saved[1::2], strict=True)
        for rows, tokens, buffer in _blocks(hidden, weight):
            # ∂ log π(y) / ∂ logits = [y] - π, and ∂ H / ∂ logits = -π · (log π + H)
            if block := next(saved_blocks, None):
                powers, highest = block
                shrink = (highest - log_normalizer[rows]).exp()
                grad = torch.mul(powers, (-shrink * logprob_grad[rows])[:, None], out=buffer)
            else:
                logits = _compute_logits(hidden, weight, bias, ctx.scale, rows, tokens, out=buffer)
                logprobs = logits.sub_(log_normalizer[rows, None])
                if entropy_grad is None:
                    grad = logprobs.exp_().mul_(-logprob_grad[rows, None])
                else:
                    probs = logprobs.exp()
                    by_entropy = entropy_grad[rows, None]
                    logprobs.add_(entropy[rows, None]).mul_(-by_entropy)
                    grad = logprobs.sub_(logprob_grad[rows, None]).mul_(probs)
            is_inside, columns = _find(token_ids[rows], tokens)
            grad.scatter_add_(1, columns, torch.where(is_inside, logprob_grad[rows], 0.0)[:, None])
            if hidden_grad is not None:
                hidden_grad[rows].addmm_(grad, weight[tokens].float(), alpha=ctx.scale)
            if weight_grad is not None:
                weight_grad[tokens].addmm_(grad.T, hidden[rows].float(), alpha=ctx.scale)
            if bias_grad is not None:
                bias_grad[tokens].add_(grad.sum(dim=0), alpha=ctx.scale)
        gradients = zip((hidden_grad, weight_grad, bias_grad), (hidden, weight, bias), strict=True)
        return (*(None if grad is None else grad.to(of.dtype) for grad, of in gradients), *(None,) * 5)


def _blocks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield positions, tokens and a buffer (n, v) for their logits, which all blocks share."""
    n_positions, n_tokens = len(hidden), len(weight)
    row_step, token_step = CPU_BLOCK if hidden.device.type == "cpu" else GPU_BLOCK
    buffer = torch.empty(min(row_step, n_positions) * min(token_step, n_tokens), device=hidden.device)
    for start in range(0, n_tokens, token_step):
        tokens = slice(start, min(start + token_step, n_tokens))
        for row in range(0, n_positions, row_step):
            rows = slice(row, min(row + row_step, n_positions))
            shape = (rows.stop - rows.start, tokens.stop - tokens.start)
            yield rows, tokens, buffer[: shape[0] * shape[1]].view(shape)


def _compute_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    rows: slice,
    tokens: slice,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the float32 logits (n, v) of a block to `out`, and return it."""
    torch.mm(hidden[rows].float(), weight[tokens].float().T, out=out)
    if bias is not None:
        out.add_(bias[tokens].float())
    return out if scale == 1 else out.mul_(scale)


def _find(token_ids: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each of `token_ids` (n,) is in a block, and its column there (n, 1), any column if it is not."""
    columns = token_ids - tokens.start
    is_inside = (columns >= 0) & (token_ids < tokens.stop)
    return is_inside, columns.clamp(0, tokens.stop - tokens.start - 1)[:, None]
