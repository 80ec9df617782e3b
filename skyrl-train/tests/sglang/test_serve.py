"""The parts of SGLang that `serve.py` supplies."""

import os
import subprocess

from train_kit.sglang_cpu import PYTHON, TESTS

COMPARE_HASHES = """
import serve
import torch
from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32, murmur_hash32_kernel

generator = torch.Generator().manual_seed(0)
seeds = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).to(torch.uint64)
positions = torch.randint(0, 2**31, (5,), generator=generator)
columns = torch.arange(1500)
expected = torch.empty(5, 1500, dtype=torch.uint32)
murmur_hash32_kernel[(5, 2)](seeds, positions, columns, expected, 5, 1500, BLOCK_SIZE=1024)
assert len(expected.unique()) > 7400
assert torch.equal(murmur_hash32(seeds, positions, columns).long(), expected.long())
"""


def test_seeds_are_hashed_as_by_the_kernel_of_sglang() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([PYTHON, "-c", COMPARE_HASHES], cwd=TESTS, env=environment, check=True)
