"""Stochastic rounding of float32 to bfloat16 (Gupta et al., 2015, arXiv:1502.02551).

A bfloat16 number is the upper half of a float32 number. Rounding adds a random number below 2^16 to the float32 bits
and drops the lower half. With a lower half of r, the sum carries into the upper half with probability r / 2^16, so the
expected result is the float32 value itself:

    1.00390625 (0x3F80 8000), halfway between the bfloat16 neighbors 1.0 (0x3F80) and 1.0078125 (0x3F81),
    becomes each of them with probability 1/2.

Rounding to nearest would drop every update below half the distance of two neighbors, 2^-9 of the weight. Near 0.02 this
is 3e-5, and an AdamW step with lr=1e-6 changes a weight by 1e-6.
"""

import hashlib

import torch


def round_to_bfloat16(values: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Round float32 values to bfloat16: stochastically, or to nearest without a `generator`.

    bfloat16 values stay as they are. Infinities and NaN stay infinities and NaN.
    """
    if generator is None:
        return values.bfloat16()
    words = torch.empty(-(-values.numel() // 4), dtype=torch.int64, device=values.device)
    words.random_(-(2**63), None, generator=generator)  # 64 random bits are the noise of four values
    noise = words.view(torch.int16)[: values.numel()].view(values.shape)
    bits = values.contiguous().view(torch.int32) + noise
    bits.add_(2**15).bitwise_and_(-(2**16))  # the noise is in [-2^15, 2^15)
    return bits.view(torch.float32).bfloat16()


def noise_generator(device: torch.device, *key: int) -> torch.Generator:
    """Return a generator of random bits that depend only on `key` and the type of device."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little", signed=True))
