"""Key-value memory keeps what is stored when it grows, and copies a prompt from slot to slot."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.inference_engines.hf.kv_memory import KVMemory, StepCache, rounded_length


def stored(n_slots: int, length: int, step: list[tuple[int, int, int]]) -> tuple[KVMemory, torch.Tensor, torch.Tensor]:
    """Slots after one pass over rows of (slot, cached tokens, new tokens), and the keys it was given and got back."""
    slots = KVMemory()
    slots.reserve(n_slots, length)
    width = max(n_new for _, _, n_new in step)
    positions = torch.tensor([start for _, start, _ in step])[:, None] + torch.arange(width)
    cache = StepCache(slots, [slot for slot, _, _ in step], positions, torch.tensor([n_new for _, _, n_new in step]))
    keys = torch.randn(len(step), 2, width, 3)
    returned, values = cache.update(keys, -keys, 0)
    torch.testing.assert_close(values, -returned)
    return slots, keys, returned


@pytest.mark.parametrize(("n_tokens", "length"), [(1, 64), (64, 64), (65, 128)])
def test_lengths_are_rounded_up(n_tokens: int, length: int) -> None:
    assert rounded_length(n_tokens) == length


@pytest.mark.parametrize("rows", [[1, 2], [2, 0]])  # a range of slots, and not
def test_a_pass_gets_back_its_own_rows_without_padding_and_no_longer_than_needed(rows: list[int]) -> None:
    _, keys, returned = stored(3, 64, [(rows[0], 0, 4), (rows[1], 0, 2)])
    assert returned.shape == (2, 2, 4, 3)
    torch.testing.assert_close(returned[0], keys[0])
    torch.testing.assert_close(returned[1, :, :2], keys[1, :, :2])
    assert not returned[1, :, 2:].any()


def test_growing_keeps_what_is_stored_and_copying_takes_a_prefix() -> None:
    slots, keys, _ = stored(2, 64, [(1, 0, 5)])
    slots.reserve(4, 128)
    slots.copy([1, 1], [3, 0], 3)
    memory, _ = slots.layer(0, keys, keys)
    assert memory.shape == (4, 2, 128, 3)
    torch.testing.assert_close(memory[1, :, :5], keys[0])
    for slot in (3, 0):
        torch.testing.assert_close(memory[slot, :, :3], keys[0, :, :3])
        assert not memory[slot, :, 3:].any()
    slots.reserve(1, 1)
    assert (slots.n_slots, slots.length) == (4, 128)


def test_new_tokens_stand_after_the_stored_ones() -> None:
    slots, keys, _ = stored(2, 64, [(1, 0, 3)])
    positions = torch.tensor([[3, 4]])
    more = torch.randn(1, 2, 2, 3)
    returned, _ = StepCache(slots, [1], positions, torch.tensor([2])).update(more, more, 0)
    torch.testing.assert_close(returned, torch.cat([keys, more], dim=2))


def test_released_memory_is_gone() -> None:
    slots, keys, _ = stored(2, 64, [(1, 0, 3)])
    slots.release()
    assert (slots.n_slots, slots.length) == (0, 0)
    assert slots.layer(0, keys, keys)[0].numel() == 0
