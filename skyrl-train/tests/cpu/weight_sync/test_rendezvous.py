import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from train_kit.weight_sync import Tensors, plan_for, receive, transfer

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync import Receiver, SyncPlan, rendezvous, send
from skyrl_train.weight_sync import stream as stream_module
from skyrl_train.weight_sync.rendezvous import SenderEndpoint, call_off

pytestmark = pytest.mark.usefixtures("frozen_objects", "gpus_are_cpus")

Receive = Callable[[], object]
TIMEOUT_S = 3.0
"""Timeout in tests that wait for it. Present ends connect much faster, even on a busy machine."""


def fail_to_send(plan: SyncPlan, tensors: Iterator[tuple[str, torch.Tensor]], message: str, *receivers: Receive) -> Any:
    """Send to receivers in other threads, check the sender's error, and return the error of the last receiver."""
    with ThreadPoolExecutor(len(receivers)) as threads:
        receiving = [threads.submit(receiver) for receiver in receivers]
        with pytest.raises(SyncError, match=message):
            send(plan, tensors)
        return receiving[-1].exception()


def test_a_missing_receiver_is_named(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.5)
    plan, gathered = plan_for(tensors, n_receivers=3, timeout_s=TIMEOUT_S), iter(tensors.items())
    message = r"weight sync 1: engine 0, engine 2 did not connect within 3 s"
    assert isinstance(fail_to_send(plan, gathered, message, partial(receive, replace(plan, rank=2))), SyncError)
    assert next(gathered, None) is None, "the other ranks wait for this one to gather the rest"


def test_a_receiver_has_one_timeout_for_all_stages_of_connecting(
    tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the other ranks of the model would give up before the sender does."""
    deadlines: list[float | None] = []
    gather = SenderEndpoint.gather

    def record(endpoint: SenderEndpoint, stage: str, deadline: float | None = None) -> dict[int, object]:
        deadlines.extend([deadline] if stage == "connect" else [])
        return gather(endpoint, stage, deadline)

    monkeypatch.setattr(SenderEndpoint, "gather", record)
    transfer(plan_for(tensors), tensors)
    assert len(deadlines) == 3
    assert len(set(deadlines) - {None}) == 1


def test_a_receiver_that_hangs_is_named(tensors: Tensors) -> None:
    plan = plan_for(tensors, n_receivers=2, timeout_s=TIMEOUT_S)

    def hang() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            time.sleep(TIMEOUT_S + 1)

    receivers = (hang, partial(receive, replace(plan, rank=2)))
    message = r"engine 0 did not read the weights within 3 s"
    assert isinstance(fail_to_send(plan, iter(tensors.items()), message, *receivers), SyncError)


def test_a_receiver_that_cannot_load_ends_the_sender_at_once(tensors: Tensors) -> None:
    plan = plan_for(tensors)

    def refuse() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            raise ValueError("wrong shape")

    message = "engine 0 stopped receiving: it could not load the weights"
    assert isinstance(fail_to_send(plan, iter(tensors.items()), message, refuse), ValueError)


def test_a_sender_learns_why_its_sync_was_called_off(tensors: Tensors) -> None:
    plan = plan_for(tensors, n_receivers=2)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send, plan, iter(tensors.items()))
        while not call_off(plan, RuntimeError("engine 1 is on fire"), failed=[1, 2]):
            assert not sending.done()
        with pytest.raises(SyncError, match="called off: engine 1 is on fire"):
            sending.result()


def test_shared_memory_between_machines_is_an_error_by_name(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "open_memory", lambda *_: None)
    plan = plan_for(tensors, "shared_memory")
    message = r"engine 0 cannot open the memory of rank 0 .*generator.weight_sync_backend=auto"
    receiver = partial(receive, replace(plan, rank=1))
    assert isinstance(fail_to_send(plan, iter(tensors.items()), message, receiver), SyncError)
