import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.models.checksum import BLOCK_BYTES, ROW_WORDS, WORD_BYTES, Checksum, flat_bytes, tensor_checksum


@given(st.binary(max_size=70))
def test_the_checksum_equals_its_formula(content: bytes) -> None:
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
    c = zlib.crc32(b"w")
    expected = sum((2 * i + 1) * (word + c) for i, word in enumerate(words)) % 2**64
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    assert tensor_checksum("w", tensor) == expected


@pytest.mark.parametrize("n_words", [ROW_WORDS, 2 * BLOCK_BYTES // WORD_BYTES + 3 * ROW_WORDS + 5])
def test_rows_blocks_and_parts_add_up(n_words: int) -> None:
    words = torch.randint(-(2**62), 2**62, (n_words,))
    expected = sum((2 * i + 1) * word for i, word in enumerate(words.tolist()))
    expected = (expected + zlib.crc32(b"w") * n_words**2) % 2**64
    assert tensor_checksum("w", words) == expected
    checksum = Checksum("w")
    for part in flat_bytes(words).split(8 * WORD_BYTES * 1001):  # like parts of a stream, not aligned to rows
        checksum.add(part)
    assert checksum.value == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_changed_bit_swapped_values_and_another_name_change_it(dtype: torch.dtype) -> None:
    tensor = torch.randn(33, 7).to(dtype)
    before = tensor_checksum("w", tensor)
    assert tensor_checksum("v", tensor) != before
    changed = tensor.clone()
    changed.view(torch.uint8)[-1, -1] ^= 1
    assert tensor_checksum("w", changed) != before
    assert tensor_checksum("w", tensor.flip(0)) != before
    assert tensor_checksum("w", torch.cat([tensor[:1], tensor])[1:]) == before  # words that are not aligned
