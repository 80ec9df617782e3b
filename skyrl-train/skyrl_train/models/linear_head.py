"""Scores of chosen tokens from a linear head, without ever holding all logits in memory."""

import logging
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from skyrl_train.types import TokenScores

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

CPU_BLOCK = (2048, 1024)
"""Positions and vocabulary tokens in a block on a CPU: 8 MiB of logits, small enough for the last-level cache."""
GPU_POSITIONS, GPU_LOGITS = 8192, 1 << 26
"""Positions and logits in a block on a GPU: 256 MiB, because few large operations are fastest there."""
MAX_SAVED_BYTES = 1 << 30
"""Maximum size of the exponentials that the forward pass on a CPU saves. The backward pass recomputes the rest.

On a GPU, where memory is scarcer than arithmetic, none are saved."""
MAX_VARIANTS = 64
"""Maximum number of compiled variants of a formula, one for each dtype, size of the last dimensions and kind of
gradients."""


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

    `hidden` is (N, H), `weight` (V, H), `bias` (V,). Operands of products have the `operand_dtype` and are summed in
    float32. If the operands are float32 too, gradients are exact. Peak memory is two blocks of logits, plus up to
    `MAX_SAVED_BYTES` between the passes on a CPU. Entropies are differentiable only with `entropy_grad`. Σπ² is 0 where
    gradients are recorded, because only the scores before an update read it.

    With tensor parallelism, the ranks of `group` split the vocabulary. `weight` and `bias` then hold this rank's
    tokens, and `token_ids` count from its first token, so an id outside [0, V) belongs to another rank. Every rank
    returns the scores over the whole vocabulary. The gradient of `hidden` is this rank's share: the shares add up.
    """
    is_update = torch.is_grad_enabled()
    return TokenScores(*_LinearHeadScores.apply(hidden, weight, bias, token_ids, scale, entropy_grad, is_update, group))


def linear_head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the logits (N, V) of a linear head in float32, without gradients, in `out` if it is given.

    Operands have the `operand_dtype`. Half-precision weights on a CPU are converted block by block: 1,024 tokens at a
    time fit in its cache, so 49,152 tokens take a quarter of the time of a float32 copy of the matrix.
    """
    dtype = operand_dtype(hidden, weight)
    operand = hidden.to(dtype)
    if out is None:
        out = torch.empty(len(hidden), len(weight), device=hidden.device)
    step = len(weight) if hidden.is_cuda or weight.dtype == dtype else CPU_BLOCK[1]
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(weight), step):
            multiply(operand, weight[start : start + step].to(dtype).T, out=out[:, start : start + step])
    return out if bias is None else out.add_(bias.float())


class _LinearHeadScores(torch.autograd.Function):
    """The running softmax of flash attention (Dao et al., 2022, arXiv:2205.14135), over the vocabulary, not the keys.

    For 8,192 positions and a vocabulary of 150,000, the logits (N, V) would take 4.9 GB in float32. So the vocabulary
    is visited in blocks. For each position we keep the largest logit so far (`highest`, m below), and three sums
    relative to it, with z = logit - m:

        total = Σ e^z        moment = Σ z·e^z        squares = Σ e^2z

    When a block raises m by -s, so s = m_old - m_new ≤ 0, every earlier z becomes z + s. The sums follow without
    another look at the logits:

        total ← e^s · total        moment ← e^s · (moment + s · total)        squares ← e^2s · squares

    Example: logits 1 and 3 in two blocks. After the first, m = 1 and total = 1. The second has m = 3, s = -2 and
    total = e^-2 · 1 + 1 = 1.135. Then log Z = m + log total = 3 + 0.127 = log(e + e³), and no exponential exceeded 1.
    At the end log π(y) = logit_y - log Z, H = log total - moment / total and Σπ² = squares / total².

    The backward pass needs π block by block. It is e^(logit - log Z) from recomputed logits, or e^z · e^(m - log Z)
    where the forward pass saved e^z with the m of that moment. Both passes visit the blocks in the same order, and the
    saved ones come first.
    """

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
        highest = hidden.new_full((len(hidden),), lowest, dtype=torch.float32)  # (N,) largest logit so far
        chosen = torch.zeros_like(highest)  # (N,) logit of the chosen token
        total, moment, squares = (torch.zeros_like(highest) for _ in range(3))  # (N,) sums so far
        scratch = torch.empty_like(highest[:0])
        can_save = is_update and not entropy_grad and hidden.device.type == "cpu"
        n_saved_tokens = MAX_SAVED_BYTES // (4 * max(len(hidden), 1)) if can_save else 0
        saved = []  # e^z (n, v) and `highest` (n,) of each block within the first n_saved_tokens tokens
        dtype = operand_dtype(hidden, weight)
        operand = hidden.to(dtype)
        for rows, tokens, buffer in _blocks(hidden, weight):
            logits = _compute_logits(operand, weight, bias, scale, rows, tokens, out=buffer)  # (n, v)
            is_inside, columns = _find(token_ids[rows], tokens)  # (n,), (n, 1)
            chosen[rows] = torch.where(is_inside, logits.gather(1, columns)[:, 0], chosen[rows])

            if logits.is_cuda:
                sums = (highest[rows], total[rows], moment[rows], squares[rows])
                highest[rows], total[rows], moment[rows], squares[rows] = _add_block(logits, *sums, is_update)
                continue
            new_highest = torch.maximum(highest[rows], logits.amax(dim=1))  # (n,)
            shift = highest[rows] - new_highest  # (n,) s ≤ 0
            shrink = shift.exp()
            highest[rows] = new_highest
            logits.sub_(new_highest[:, None])  # (n, v) z
            if tokens.stop <= n_saved_tokens:
                powers = torch.exp(logits)  # (n, v) e^z
                saved += [powers, new_highest]
            else:  # one scratch buffer for all blocks, instead of an allocation of 8 MiB for each
                if len(scratch) < logits.numel():
                    scratch = torch.empty_like(logits).flatten()
                powers = torch.exp(logits, out=scratch[: logits.numel()].view_as(logits))
            moment[rows] = shrink * (moment[rows] + shift * total[rows]) + logits.mul_(powers).sum(dim=1)
            total[rows] = shrink * total[rows] + powers.sum(dim=1)
            if not is_update:
                squares[rows] = shrink.square() * squares[rows] + powers.square_().sum(dim=1)
        if group is not None:  # this rank's tokens are one large block, merged with the other ranks' by the same rule
            own_highest = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            shift = own_highest - highest  # ≤ 0
            shrink = shift.exp()
            all_sums = torch.stack(
                (chosen, shrink * total, shrink * (moment + shift * total), shrink.square() * squares)
            )  # (4, N)
            dist.all_reduce(all_sums, group=group)
            chosen, total, moment, squares = all_sums.unbind()
        log_total = total.log()
        entropy = log_total - moment / total
        log_normalizer = highest + log_total
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_normalizer, entropy, *saved)
        ctx.scale, ctx.operand_dtype = scale, dtype
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
        operand = hidden.to(ctx.operand_dtype)
        for rows, tokens, buffer in _blocks(hidden, weight):
            # For logits (n, v) of a block: ∂ log π(y) / ∂ logits = [y] - π, and ∂ H / ∂ logits = -π · (log π + H).
            by_entropy = None if entropy_grad is None else entropy_grad[rows]
            if block := next(saved_blocks, None):
                powers, highest = block
                shrink = (highest - log_normalizer[rows]).exp()
                grad = torch.mul(powers, (-shrink * logprob_grad[rows])[:, None], out=buffer)
                _add_chosen(grad, token_ids[rows], tokens, logprob_grad[rows])
            else:
                logits = _compute_logits(operand, weight, bias, ctx.scale, rows, tokens, out=buffer)
                if logits.is_cuda:
                    columns = token_ids[rows] - tokens.start
                    by_row = (log_normalizer[rows], columns, logprob_grad[rows], entropy[rows], by_entropy)
                    grad = _block_gradient(logits, *by_row, ctx.operand_dtype)
                else:
                    grad = logits.sub_(log_normalizer[rows, None])
                    if by_entropy is None:
                        grad.exp_().mul_(-logprob_grad[rows, None])
                    else:
                        probs = grad.exp()
                        grad.add_(entropy[rows, None]).mul_(-by_entropy[:, None])
                        grad.sub_(logprob_grad[rows, None]).mul_(probs)
                    _add_chosen(grad, token_ids[rows], tokens, logprob_grad[rows])
            if hidden_grad is not None:
                _add_product(hidden_grad[rows], grad, weight[tokens].to(grad.dtype), ctx.scale)
            if weight_grad is not None:
                _add_product(weight_grad[tokens], grad.T, operand[rows], ctx.scale)
            if bias_grad is not None:
                bias_grad[tokens].add_(grad.sum(dim=0, dtype=torch.float32), alpha=ctx.scale)
        return hidden_grad, weight_grad, bias_grad, *(None,) * 5  # autograd casts them, unless `grad_dtype` is float32


def _blocks(hidden: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield positions, tokens and a buffer (n, v) for their logits. All blocks share the buffer's memory."""
    n_positions, n_tokens = len(hidden), len(weight)
    row_step, token_step = CPU_BLOCK
    if hidden.is_cuda:
        row_step = max(1, min(GPU_POSITIONS, n_positions))
        token_step = GPU_LOGITS // row_step
    buffer = torch.empty(min(row_step, n_positions) * min(token_step, n_tokens), device=hidden.device)
    for start in range(0, n_tokens, token_step):
        tokens = slice(start, min(start + token_step, n_tokens))
        for row in range(0, n_positions, row_step):
            rows = slice(row, min(row + row_step, n_positions))
            shape = (rows.stop - rows.start, tokens.stop - tokens.start)
            yield rows, tokens, buffer[: shape[0] * shape[1]].view(shape)


def operand_dtype(hidden: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of the operands of a head's products. Sums are float32 in any case.

    On a GPU, the operands have the dtype of the model's other products, because float32 products take ten times as
    long. Elsewhere they are float32.
    """
    if hidden.is_cuda and torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda")
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    return weight.dtype if hidden.is_cuda and is_half and hidden.dtype == weight.dtype else torch.float32


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float32 product of two matrices of one `operand_dtype`."""
    if left.dtype == torch.float32:
        return torch.mm(left, right, out=out)
    return torch.mm(left, right, out_dtype=torch.float32, out=out)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    if left.dtype == torch.float32:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(multiply(left, right), alpha=scale)


def _compute_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    rows: slice,
    tokens: slice,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the float32 logits (n, v) of a block to `out`, and return it. Products have the dtype of `hidden`."""
    multiply(hidden[rows], weight[tokens].to(hidden.dtype).T, out=out)
    if bias is not None:
        out.add_(bias[tokens].float())
    return out if scale == 1 else out.mul_(scale)


def compiled_on_gpu(formula: Callable[P, T]) -> Callable[P, T]:
    """Compile `formula` for calls whose first argument is a tensor on a GPU.

    The first dimension of that tensor counts tokens. It is dynamic, as is the first dimension of every tensor of the
    same length, so calls with another number of tokens do not recompile. Without a compiler, or with
    `TORCH_COMPILE_DISABLE=1`, the formula runs eagerly.
    """
    compiled = None

    @wraps(formula)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal compiled
        first = args[0]
        if not (isinstance(first, torch.Tensor) and first.is_cuda and can_compile()):
            return formula(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(formula)
        for tensor in args:
            if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) == len(first):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*args, **kwargs)

    return call


@cache
def can_compile() -> bool:
    """Return True if PyTorch can compile for this GPU, for which it needs Triton and a C compiler."""
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    torch._inductor.config.compile_threads = 1  # a few small kernels are not worth a pool of processes
    try:
        torch.compile(torch.neg)(torch.ones(8, device="cuda"))
    except RuntimeError as error:  # the base class of all compiler errors
        logger.info("The sums of the head are not compiled: %s", error)
        return False
    return True


@compiled_on_gpu
def _add_block(
    logits: torch.Tensor,
    highest: torch.Tensor,
    total: torch.Tensor,
    moment: torch.Tensor,
    squares: torch.Tensor,
    is_update: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a block of logits (n, v) to the running sums (n,) of `_LinearHeadScores`, and return the new sums."""
    new_highest = torch.maximum(highest, logits.amax(dim=1))
    shift = highest - new_highest
    shrink = shift.exp()
    logits = logits - new_highest[:, None]
    powers = logits.exp()
    moment = shrink * (moment + shift * total) + (logits * powers).sum(dim=1)
    total = shrink * total + powers.sum(dim=1)
    if not is_update:
        squares = shrink.square() * squares + powers.square().sum(dim=1)
    return new_highest, total, moment, squares


@compiled_on_gpu
def _block_gradient(
    logits: torch.Tensor,
    log_normalizer: torch.Tensor,
    columns: torch.Tensor,
    logprob_grad: torch.Tensor,
    entropy: torch.Tensor,
    entropy_grad: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient (n, v) of a block of logits. `columns` (n,) are the chosen tokens, in any block."""
    logprobs = logits - log_normalizer[:, None]
    by_logit = logprob_grad[:, None]
    if entropy_grad is not None:
        by_logit = by_logit + entropy_grad[:, None] * (logprobs + entropy[:, None])
    is_chosen = columns[:, None] == torch.arange(logits.shape[1], device=logits.device)
    return (torch.where(is_chosen, logprob_grad[:, None], 0.0) - logprobs.exp() * by_logit).to(dtype)


def _add_chosen(grad: torch.Tensor, token_ids: torch.Tensor, tokens: slice, logprob_grad: torch.Tensor) -> None:
    """Add the gradient of the chosen tokens in a block."""
    is_inside, columns = _find(token_ids, tokens)
    grad.scatter_add_(1, columns, torch.where(is_inside, logprob_grad, 0.0)[:, None])


def _find(token_ids: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each of `token_ids` (n,) is in a block, and its column (n, 1), an arbitrary one if it is not."""
    columns = token_ids - tokens.start
    is_inside = (columns >= 0) & (token_ids < tokens.stop)
    return is_inside, columns.clamp(0, tokens.stop - tokens.start - 1)[:, None]
