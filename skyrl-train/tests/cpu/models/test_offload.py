import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from train_kit.models import CPU

from skyrl_train.models import offload
from skyrl_train.models.offload import OffloadedTensors, count_kept_bytes, release_heap

MB = 1 << 20


@contextmanager
def memory_left(n_bytes: int) -> Iterator[None]:
    """Limit the memory that this process may still allocate."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_values_and_shared_memory_return() -> None:
    base = torch.randn(7, 5)
    base[0, 0] = torch.nan
    parameter = torch.nn.Parameter(base)
    transposed, row, empty, half = parameter.detach().T, base[3], torch.empty(0), torch.randn(3).bfloat16()
    expected = [tensor.clone() for tensor in (base, half)]
    offloaded = OffloadedTensors([parameter, transposed, half, empty], CPU)
    assert parameter.shape == (7, 5)
    assert [tensor.untyped_storage().nbytes() for tensor in (parameter, row, half)] == [0, 0, 0]
    offloaded.restore()
    for tensor, values in zip((base, half), expected, strict=True):
        torch.testing.assert_close(tensor, values, rtol=0, atol=0, equal_nan=True)
    with torch.no_grad():
        parameter[3, 1] = 42
    assert row[1] == transposed[1, 3] == 42, "no longer the same memory"
    offloaded.restore()
    assert row[1] == 42, "restored twice"


def test_tensors_share_blocks_of_host_memory_and_may_span_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK_BYTES", 64)
    tensors = [torch.randn(size) for size in (3, 40, 16, 1)]  # 240 bytes
    expected = [tensor.clone() for tensor in tensors]
    offloaded = OffloadedTensors(tensors, CPU)
    blocks = {piece.untyped_storage().data_ptr() for _, pieces in offloaded._copies for piece in pieces}
    assert len(blocks) == 4
    assert offloaded.n_bytes == 240
    offloaded.restore()
    assert all(torch.equal(tensor, values) for tensor, values in zip(tensors, expected, strict=True))


def test_tensors_elsewhere_and_mapped_files_stay(tmp_path: Path) -> None:
    save_file({"weight": torch.arange(6.0)}, tmp_path / "model.safetensors")
    mapped, other = load_file(tmp_path / "model.safetensors")["weight"], torch.empty(3, device="meta")
    OffloadedTensors([mapped, other], CPU)
    assert mapped.tolist() == [0, 1, 2, 3, 4, 5]
    assert other.untyped_storage().nbytes() == 12


def nothing_is_released() -> None:
    tensors = [torch.full((16 * MB,), value, dtype=torch.float32) for value in (1, 2)]
    with memory_left(96 * MB), pytest.raises(RuntimeError, match="allocate"):
        OffloadedTensors(tensors, CPU)
    assert [tensor[-1].item() for tensor in tensors] == [1, 2]


def tensors_are_restored_later() -> None:
    tensors = [torch.full((size,), 7, dtype=torch.float32) for size in (16 * MB, 1000)]
    offloaded = OffloadedTensors(tensors, CPU)
    with memory_left(32 * MB), pytest.raises(RuntimeError, match="allocate"):
        offloaded.restore()
    offloaded.restore()
    assert [tensor[-1].item() for tensor in tensors] == [7, 7]


def freed_memory_is_given_back() -> None:
    for _ in range(2):  # once glibc has seen a size freed, it takes it from the heap
        tensors = [torch.ones(MB) for _ in range(50)]  # 200 MB
        later = torch.ones(MB // 4)
        del tensors
    before = psutil.Process().memory_info().rss
    assert count_kept_bytes() > 150 * MB
    release_heap()
    assert psutil.Process().memory_info().rss < before - 150 * MB
    assert later.sum() == MB // 4


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("check", [nothing_is_released, tensors_are_restored_later, freed_memory_is_given_back])
def test_too_little_memory(check: Callable[[], None]) -> None:
    # In a new process: the limit does not count memory that earlier tests have freed and their allocator has kept.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        executor.submit(check).result()
