"""SGLang's server on a CPU: `python serve.py` takes the arguments of `python -m sglang.launch_server`.

SGLang computes everything that a dense model needs in PyTorch if a CPU has no AMX. It still imports packages that exist
for GPUs only. This program supplies the names that it imports. Each raises `NotImplementedError` when called, with
three exceptions, which work:

- `murmur_hash32_cpu`, from which SGLang draws tokens by seed. `test_serve.py` compares it with SGLang's Triton kernel.
- deterministic inference with the attention of PyTorch, without batch-invariant kernels: only seeds have an effect.
- `torch_memory_saver`, which keeps the memory and checks that each part is released and resumed in turn.
"""

import os
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

# Kernels that SGLang imports on every CPU; it calls them for speculative decoding.
SPECULATIVE_KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
UINT32 = 0xFFFFFFFF


def refuse(name: str) -> Callable[..., Any]:
    """Return a function that raises NotImplementedError."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} is not available on this CPU")

    return call


def add_module(name: str, **members: Any) -> None:
    """Let `import name` return a module with these members."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module


# -- seeds


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 (n, m) of each pair of a seed and position (n,), and each column (m,), as uint32."""
    seeds = seed.to(torch.int64)[:, None]
    words = (seeds & UINT32, (seeds >> 32) & UINT32, positions[:, None].to(torch.int64), columns[None].to(torch.int64))
    value = torch.zeros(len(seed), len(columns), dtype=torch.int64)
    for word in words:
        word = _rotate((word * 0xCC9E2D51) & UINT32, 15)
        value = _rotate(value ^ ((word * 0x1B873593) & UINT32), 13)
        value = (value * 5 + 0xE6546B64) & UINT32
    value ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        value = ((value ^ (value >> shift)) * factor) & UINT32
    return value.to(torch.uint32)


def _rotate(value: torch.Tensor, n_bits: int) -> torch.Tensor:
    return ((value << n_bits) | (value >> (32 - n_bits))) & UINT32


def allow_seeds() -> None:
    """Accept `--enable-deterministic-inference` with the attention of PyTorch."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    batch_invariant_ops.enable_batch_invariant_mode = lambda: None


# -- memory


class MemorySaver:
    """Bookkeeping of released parts, as strict as torch_memory_saver."""

    def __init__(self) -> None:
        self._released: set[str] = set()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Allocate memory of a part."""
        yield

    def pause(self, tag: str) -> None:
        """Release a part."""
        assert tag not in self._released, f"{tag} is released already"
        self._released.add(tag)

    def resume(self, tag: str) -> None:
        """Allocate a released part."""
        self._released.remove(tag)


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Start a process that can release memory."""
    yield


# -- what SGLang imports

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
add_module("sgl_kernel", **{name: refuse(name) for name in SPECULATIVE_KERNELS})
add_module("torch_memory_saver", torch_memory_saver=MemorySaver(), configure_subprocess=configure_subprocess)
KERNELS = torch.library.Library("sgl_kernel", "DEF")
KERNELS.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
KERNELS.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
try:
    import torchvision  # noqa: F401
except RuntimeError:  # the build of PyPI cannot load its operators without CUDA
    VISION = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        VISION.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
allow_seeds()  # SGLang's own processes execute this file, too

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
