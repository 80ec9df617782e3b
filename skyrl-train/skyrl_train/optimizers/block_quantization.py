"""Block-wise quantization to 8 bits (Dettmers et al., 2022, "8-bit Optimizers via Block-wise Quantization").

A tensor (…, n) is split into blocks of 256 values along its last dimension. A block is stored as its largest magnitude,
the scale, and an 8-bit code for each value: the index of the nearest value in a table of 256 numbers in [-1, 1]. The
table is dynamic, i.e. finer near 0. Its k-th decade below 1 has half as many values as the decade above:

    signed:   64 values in (0.1, 1), 32 in (0.01, 0.1), …, 1 in (1e-7, 1e-6), the same below 0, and 0 and 1
    unsigned: 128 values in (0.1, 1), 64 in (0.01, 0.1), …, 2 in (1e-7, 1e-6), and 0 and 1

Codes have the shape of the tensor and scales the shape (…, n_blocks), so both shard along dimension 0 as the tensor.
"""

from functools import cache
from typing import NamedTuple

import torch

from skyrl_train.types.training_memory import BLOCK_SIZE

N_DECADES = 7


class QuantizationTable(NamedTuple):
    """The values of the 256 codes, and what finds the nearest of them without a binary search.

    The upper half of a float32 number, as an index into `first_codes`, gives the code of the smallest number with this
    upper half. Between two numbers with the same upper half lies at most one of the `limits` between neighboring codes,
    so one comparison decides between this code and the next.
    """

    values: torch.Tensor  # (256,) float32, ascending
    limits: torch.Tensor  # (256,) float32 midpoints to the next value, infinite after the last value
    first_codes: torch.Tensor  # (65536,) uint8


@cache
def quantization_table(is_signed: bool, device: torch.device) -> QuantizationTable:
    """Return the table of signed values in [-1, 1], or of values in [0, 1]."""
    with torch.inference_mode(False):  # the table is cached, and autograd rejects tensors of inference mode
        decades = []
        for k in range(N_DECADES):
            n_values = 2 ** (N_DECADES - 1 - k) * (1 if is_signed else 2)
            edges = torch.linspace(0.1, 1, n_values + 1, dtype=torch.float64)
            decades.append((edges[:-1] + edges[1:]) / 2 * 10.0**-k)
        positive = torch.cat(decades)
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
        values = torch.cat([positive, -positive, ends] if is_signed else [positive, ends]).sort().values.float()
        limits = torch.cat([(values[:-1] + values[1:]) / 2, torch.tensor([torch.inf])])
        upper_half = torch.arange(2**16, dtype=torch.int32)
        smallest = torch.where(upper_half < 2**15, upper_half << 16, (upper_half << 16) | 0xFFFF).view(torch.float32)
        first_codes = torch.bucketize(smallest, limits[:-1]).to(torch.uint8)
        return QuantizationTable(values.to(device), limits.to(device), first_codes.to(device))


def quantize(values: torch.Tensor, *, is_signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes (rows, n) and the scales (rows, n_blocks) of float32 values (rows, n).

    An unsigned value above 0 never gets the code of 0: AdamW divides by the root of the second moment.
    """
    table = quantization_table(is_signed, values.device)
    rows, n = values.shape
    blocks = _split(values)  # (rows, n_blocks, size)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=-1)  # (rows, n_blocks)
    scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    scaled = scaled.view(rows, -1)[:, :n].flatten()
    upper_half = (scaled.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    codes = table.first_codes.index_select(0, upper_half)
    codes += scaled > table.limits.index_select(0, codes.int())
    if not is_signed:
        codes += (codes == 0) & (scaled > 0)
    return codes.view(rows, n), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, *, is_signed: bool) -> torch.Tensor:
    """Return the float32 values (rows, n) of codes (rows, n) and scales (rows, n_blocks)."""
    table = quantization_table(is_signed, codes.device)
    values = table.values.index_select(0, codes.flatten().int()).view(codes.shape)
    blocks = _split(values).mul_(scales[..., None])
    return blocks.view(len(codes), -1)[:, : codes.shape[1]]


def _split(values: torch.Tensor) -> torch.Tensor:
    """Return values (rows, n) as blocks (rows, n_blocks, size), the last block padded with zeros."""
    rows, n = values.shape
    size = min(BLOCK_SIZE, n)
    if missing := -n % size:
        values = torch.nn.functional.pad(values, (0, missing))
    return values.reshape(rows, -1, size)
