"""Broadcasts between processes: tensors that the sender refuses."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.errors import SyncError
from skyrl_train.types.specs import TensorSpec
from skyrl_train.weight_sync import SyncPlan
from skyrl_train.weight_sync.broadcast import send_broadcast
from skyrl_train.weight_sync.sync import free_port

SPECS = (TensorSpec("a", (2,), torch.float32), TensorSpec("b", (3,), torch.float32))


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"a": torch.ones(2)}, r"no tensor \(0,\)"),  # the model has fewer tensors than the plan
        ({"a": torch.ones(2), "c": torch.ones(3)}, r"c \(3,\)"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, r"b \(2,\)"),
    ],
)
def test_tensors_that_differ_from_the_plan_are_an_error(tensors: dict[str, torch.Tensor], found: str) -> None:
    plan = SyncPlan(1, "broadcast", f"127.0.0.1:{free_port()}", (SPECS,), n_receivers=0)
    with pytest.raises(SyncError, match=f"the model has {found} where the plan has .*"):
        send_broadcast(plan, iter(tensors.items()))
