from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_kit.weight_sync import Tensors, plan_for, random_tensors, receive, transfer

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync import Receipt, send
from skyrl_train.weight_sync.transfer import SentWeights, bits_of, find_changes

pytestmark = pytest.mark.usefixtures("frozen_objects")


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


class ChangeSender:
    """A sender, and a receiver that has received its weights once."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors, self.version = tensors, 1
        self.own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self._sent_weights = SentWeights()
        self.first = self._transfer(None)[0]

    def send(self) -> tuple[Receipt, Receipt]:
        """Send the changes, and return the receipts of sender and receiver."""
        self.version += 1
        return self._transfer(self.version - 1)

    def _transfer(self, base: int | None) -> tuple[Receipt, Receipt]:
        plan = replace(plan_for(self.tensors, tracks_changes=True, base_version=base), version=self.version)
        sent, [(_, receipt)] = transfer(plan, self.tensors, into=self.own, sent_weights=self._sent_weights)
        return sent, receipt


@settings(max_examples=10)
@given(st.sampled_from([torch.bfloat16, torch.float32]), st.floats(0, 1), st.integers(0, 100))
def test_changes_make_receivers_equal_to_the_sender(dtype: torch.dtype, density: float, seed: int) -> None:
    tensors = random_tensors([(40, 30), (7,), (3, 500)], dtype, seed)
    changes, generator = ChangeSender(tensors), torch.Generator().manual_seed(seed)
    for _ in range(2):
        for tensor in tensors.values():
            is_changed = torch.rand(tensor.shape, generator=generator) < density**3
            tensor.add_(torch.where(is_changed, torch.randn(tensor.shape, generator=generator), 0).to(dtype))
        sent, receipt = changes.send()
        for name, tensor in tensors.items():
            assert torch.equal(changes.own[name].view(torch.uint8), tensor.view(torch.uint8))
        assert receipt == sent


def test_few_changes_are_a_short_stream() -> None:
    changes = ChangeSender(random_tensors([(300, 300)], torch.bfloat16))
    changes.tensors["layer.0"][:, :3] += 1
    sent, _ = changes.send()
    assert torch.equal(changes.own["layer.0"], changes.tensors["layer.0"])
    assert sent.n_bytes == changes.first.n_bytes
    assert sent.n_sent < changes.first.n_sent / 30


def test_changes_on_other_weights_are_noticed() -> None:
    changes = ChangeSender(random_tensors([(30, 30)]))
    changes.own["layer.0"][7, 7] += 1
    sent, receipt = changes.send()
    assert receipt.checksum != sent.checksum


def test_changes_since_another_version_are_rejected(tensors: Tensors) -> None:
    plan = plan_for(tensors, tracks_changes=True, base_version=4)
    with pytest.raises(SyncError, match="changes since version 4, but the sender has kept version None"):
        send(plan, iter(tensors.items()), SentWeights())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda tensors: tensors.pop("layer.4"), r"no tensor \(0,\)"),  # the model has fewer tensors than the plan
        (lambda tensors: tensors.update({"layer.4": torch.ones(1)}), r"layer.4 \(1,\)"),
    ],
)
def test_tensors_that_differ_from_the_plan_end_both_ends(
    tensors: Tensors, change: Callable[[Tensors], object], found: str
) -> None:
    plan = plan_for(tensors)
    change(tensors)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, replace(plan, rank=1))
        with pytest.raises(SyncError, match=f"the model has {found} where the plan has .*"):
            send(plan, iter(tensors.items()))
        with pytest.raises(SyncError):
            receiving.result()
