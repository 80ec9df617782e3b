"""Sequence parallelism: ranks with the same rows each compute a slice of the tokens.

Only attention needs all tokens of a row, and it computes each head separately, so the ranks exchange tokens for heads
before attention, and heads for tokens after it (DeepSpeed-Ulysses, Jacobs et al., 2023, arXiv:2309.14509). With 2
ranks, 10 tokens and 4 heads, a rank has tokens 0-4 with all 4 heads, then heads 0-1 of all 10 tokens, then tokens 0-4
with all heads again.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from skyrl_train.errors import ConfigError


class SequenceGroup:
    """The ranks that split a micro-batch's tokens into equal slices, one per rank.

    Of U tokens, each slice has u = ⌈U / size⌉. The last slices may end with padding.
    """

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        """Use the ranks of a process group. `key` is the configuration key of its size, for error messages."""
        self.process_group = group
        self.size = group.size()
        self.setting = f"{key}={self.size}"

    def slice_start(self, n_tokens: int) -> int:
        """Return the index of the first token of this rank's slice."""
        return self.process_group.rank() * self._slice_length(n_tokens)

    def _slice_length(self, n_tokens: int) -> int:
        return math.ceil(n_tokens / self.size)

    def take_slice(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice (u,) of token ids or positions (U,), padded with 0."""
        start, length = self.slice_start(len(tokens)), self._slice_length(len(tokens))
        part = tokens[start : start + length]
        return torch.nn.functional.pad(part, (0, length - len(part)))

    def tokens_to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n_tokens: int
    ) -> list[torch.Tensor]:
        """Exchange all heads of this rank's tokens, (u, heads, d) each, for a share of the heads of all U tokens.

        A rank gets its query heads together with the key and value heads that they read. If the number of key and value
        heads is not a multiple of the number of ranks, heads are copied, so several ranks may have the same head.
        `n_tokens` is U. Raise ConfigError if the number of query heads is not a multiple of the number of ranks.
        """
        n_heads = query.shape[1]
        if n_heads % self.size:
            divisors = ", ".join(str(n) for n in range(1, n_heads + 1) if n_heads % n == 0)
            raise ConfigError(
                f"{self.setting} must divide the model's {n_heads} attention heads; try one of {divisors}"
            )
        parts = []
        for states in (query, key, value):
            n_copies = math.lcm(states.shape[1], self.size) // states.shape[1]
            parts.append(states.repeat_interleave(n_copies, dim=1).unflatten(1, (self.size, -1)))  # (u, size, heads, d)
        sent = torch.cat([part.flatten(2) for part in parts], dim=2).transpose(0, 1)  # (size, u, Σ heads · d)
        received = _Exchange.apply(sent, self.process_group).flatten(0, 1)[:n_tokens]  # (U, Σ heads · d)
        columns = received.split([part[0, 0].numel() for part in parts], dim=1)
        return [states.unflatten(1, part.shape[2:]) for states, part in zip(columns, parts, strict=True)]

    def heads_to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange a share of the heads of all tokens (U, heads, d) for all heads of this rank's tokens (u, …)."""
        n_tokens = len(states)
        n_padding = self.size * self._slice_length(n_tokens) - n_tokens
        padded = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, n_padding))
        received = _Exchange.apply(padded.unflatten(0, (self.size, -1)), self.process_group)  # (size, u, heads, d)
        return received.transpose(0, 1).flatten(1, 2)

    def gather(self, states: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Gather the slices (u, …) of all ranks, and return the states of all tokens (U, …), detached."""
        parts = [torch.empty_like(states) for _ in range(self.size)]
        dist.all_gather(parts, states.detach().contiguous(), group=self.process_group)
        return torch.cat(parts)[:n_tokens]


def sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' values, for a loss that each rank computes from the total.

    Gradients are not summed. Each rank differentiates the same loss in its own values, and the parameters' gradients
    are summed over all ranks later, so every token counts once.
    """
    return _Sum.apply(values, group)


class _Exchange(torch.autograd.Function):
    """Sends `parts[i]` to rank i, and returns what each rank sent to this one."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Exchange.forward(ctx, grad, ctx.group), None  # the exchange is its own inverse


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
