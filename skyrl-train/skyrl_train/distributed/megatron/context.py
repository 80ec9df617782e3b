"""Context parallelism: ranks with the same layers each compute some of the tokens of every row.

With n ranks, L tokens are split into 2n chunks, and rank r computes the chunks r and 2n - 1 - r, so all ranks read
equally many keys in causal attention. With 2 ranks and 8 tokens, rank 0 has tokens 0 1 and 6 7 (their chunks read 2 + 8
keys), rank 1 has 2 3 and 4 5 (4 + 6 keys). Megatron-Core returns position embeddings in this order.
"""

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def own_chunks(group: dist.ProcessGroup) -> list[int]:
    """Return the indices of this rank's chunks."""
    return [group.rank(), 2 * group.size() - 1 - group.rank()]


def take_own_tokens(token_ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's tokens (B, L / n) of rows (B, L)."""
    return token_ids.unflatten(1, (2 * group.size(), -1))[:, own_chunks(group)].flatten(1)


def find_own_positions(
    positions: torch.Tensor, n_tokens: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask (N,) of the positions that this rank computes, and the index of each among this rank's tokens.

    Positions (N,) count the tokens of a row of `n_tokens`.
    """
    length = n_tokens // (2 * group.size())
    first, second = own_chunks(group)
    chunks, offsets = positions // length, positions % length
    is_own = (chunks == first) | (chunks == second)
    return is_own, (offsets + length * (chunks == second))[is_own]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return causal attention (B, heads, L / n, d) of this rank's queries to the keys and values of all ranks.

    Queries are (L / n, B, heads, d), keys and values (L / n, B, groups, d). The backward pass sums the gradients of
    keys and values over ranks.
    """
    gathered = gather_from_sequence_parallel_region(torch.cat((key, value), dim=3), group=group)  # rank by rank
    first, second = gathered.unflatten(0, (group.size(), 2, -1)).unbind(1)  # (n, L / 2n, B, groups, 2d) each
    ordered = torch.cat((first, second.flip(0))).flatten(0, 1).permute(1, 2, 0, 3)  # (B, groups, L, 2d)
    key, value = ordered.chunk(2, dim=3)
    attended = []
    for chunk, queries in zip(own_chunks(group), query.permute(1, 2, 0, 3).chunk(2, dim=2), strict=True):
        length = queries.shape[2]
        n_keys = (chunk + 1) * length
        mask = causal_lower_right(length, n_keys)
        attended.append(
            scaled_dot_product_attention(queries, key[:, :, :n_keys], value[:, :, :n_keys], mask, enable_gqa=True)
        )
    return torch.cat(attended, dim=2)
