import torch

from skyrl_train.inference_engines.hf.kv_memory import Copy, KVMemory


def test_copies_are_simultaneous_and_released_memory_is_zero_again() -> None:
    memory, numbers = KVMemory(8), torch.arange(8.0)[:, None, None].expand(8, 1, 2)
    for index in (1, 2):
        keys, values = memory.layer(index, numbers, numbers)
        keys.copy_(numbers)
        values.copy_(numbers + 100)
    memory.copy([Copy(0, 2, 2), Copy(2, 0, 2), Copy(4, 5, 3)])  # two copies swap regions, one overlaps itself
    for index in (1, 2):
        keys, values = memory.layer(index, numbers, numbers)
        assert keys[:, 0, 0].tolist() == [2, 3, 0, 1, 4, 4, 5, 6]
        assert values[:, 0, 1].tolist() == [102, 103, 100, 101, 104, 104, 105, 106]
    memory.release()
    assert all(pool.eq(0).all() for pool in memory.layer(1, numbers, numbers))
