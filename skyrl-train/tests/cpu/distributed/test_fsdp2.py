from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_train.distributed import FSDP2Strategy, hugging_face
from skyrl_train.types.specs import World

N_RANKS = 32


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FSDP2Strategy]:
    """Rank 0 of 32 ranks that exchange nothing, and so have neither a group for files nor time limits."""
    monkeypatch.setattr(hugging_face, "new_save_group", lambda: None)
    monkeypatch.setattr(hugging_face, "set_timeout", lambda mesh, timeout: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    try:
        yield FSDP2Strategy(World(0, N_RANKS), timedelta(seconds=60))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("fsdp_size", "n_shards"), [(-1, 32), (32, 32), (8, 8), (4, 4), (1, 1)])
def test_a_rank_holds_its_share_of_the_weights(strategy: FSDP2Strategy, fsdp_size: int, n_shards: int) -> None:
    """With `fsdp_size=8`, four groups hold a copy each, and a rank an eighth of it."""
    layer = fully_shard(torch.nn.Linear(64, 64), mesh=strategy._mesh(fsdp_size))
    weight = layer.get_parameter("weight")
    assert isinstance(weight, DTensor)
    assert weight.to_local().numel() == 64 * 64 // n_shards
