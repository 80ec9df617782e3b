import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.weight_sync.changes import bits_of, find_changes


@settings(max_examples=60)
@given(
    st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]),
    st.integers(0, 3000),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_old_bits_and_changes_make_new_bits(dtype: torch.dtype, size: int, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = bits_of(torch.randn(size, generator=generator).to(dtype)).clone()
    new = torch.where(torch.rand(size, generator=generator) < density**4, old + 1, old)
    changes = find_changes(old, new)
    changes.apply(old)
    assert torch.equal(old, new)


def test_nan_and_negative_zero_are_kept_bit_by_bit() -> None:
    old, new = torch.tensor([0.0, 1.0, torch.nan]), torch.tensor([-0.0, torch.nan, torch.nan])
    changes = find_changes(bits_of(old), bits_of(new))
    assert len(changes.gaps) == 2
    changes.apply(bits_of(old))
    assert torch.equal(bits_of(old), bits_of(new))


def test_few_changes_are_small() -> None:
    old = torch.zeros(1 << 20, dtype=torch.int16)
    new = old.clone()
    new[torch.randperm(len(new))[: len(new) // 100]] = 1
    assert find_changes(old, new).n_bytes < old.nbytes / 50
    assert find_changes(old, old).n_bytes == 0
