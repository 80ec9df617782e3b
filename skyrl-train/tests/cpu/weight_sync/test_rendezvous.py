import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from train_kit.weight_sync import Tensors, plan_for, receive, transfer

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync import Receiver, rendezvous, send
from skyrl_train.weight_sync import stream as stream_module
from skyrl_train.weight_sync.rendezvous import SenderEndpoint, call_off

pytestmark = pytest.mark.usefixtures("frozen_objects", "gpus_are_cpus")

TIMEOUT_S = 3.0
"""Timeout in tests that wait for it. Present ends connect much faster, even on a busy machine."""


def test_a_missing_receiver_is_named(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.5)
    plan, gathered = plan_for(tensors, n_receivers=3, timeout_s=TIMEOUT_S), iter(tensors.items())
    with ThreadPoolExecutor(1) as threads:
        present = threads.submit(receive, replace(plan, rank=2))
        with pytest.raises(SyncError, match=r"weight sync 1: engine 0, engine 2 did not connect within 3 s"):
            send(plan, gathered)
        assert next(gathered, None) is None, "the other ranks wait for this one to gather the rest"
        with pytest.raises(SyncError):
            present.result()


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
    plan, is_over = plan_for(tensors, n_receivers=2, timeout_s=TIMEOUT_S), threading.Event()

    def hang() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            is_over.wait(60)

    with ThreadPoolExecutor(2) as threads:
        threads.submit(hang)
        reading = threads.submit(receive, replace(plan, rank=2))
        with pytest.raises(SyncError, match=r"engine 0 did not read the weights within 3 s"):
            send(plan, iter(tensors.items()))
        is_over.set()
        with pytest.raises(SyncError):
            reading.result()


def test_a_receiver_that_cannot_load_ends_the_sender_at_once(tensors: Tensors) -> None:
    plan = plan_for(tensors)

    def refuse() -> None:
        for _ in Receiver(replace(plan, rank=1)):
            raise ValueError("wrong shape")

    with ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(refuse)
        with pytest.raises(SyncError, match="engine 0 stopped receiving: it could not load them"):
            send(plan, iter(tensors.items()))
        with pytest.raises(ValueError, match="wrong shape"):
            refusing.result()


def test_a_sender_learns_why_its_sync_was_called_off(tensors: Tensors) -> None:
    plan = plan_for(tensors, n_receivers=2)
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send, plan, iter(tensors.items()))
        while not call_off(plan, RuntimeError("engine 1 is on fire"), failed=[1, 2]):
            assert not sending.done()
        with pytest.raises(SyncError, match="called off: engine 1 is on fire"):
            sending.result()


def test_shared_memory_between_machines_is_an_error_by_name(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "open_memory", lambda address: None)
    plan = plan_for(tensors, "shared_memory")
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(receive, replace(plan, rank=1))
        refusal = r"engine 0 cannot open the memory of rank 0 .*generator.weight_sync_backend=auto"
        with pytest.raises(SyncError, match=refusal):
            send(plan, iter(tensors.items()))
        with pytest.raises(SyncError):
            receiving.result()
