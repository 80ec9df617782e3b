"""Threads and the garbage collector while a run works."""

from __future__ import annotations

import gc
import threading

import torch

from skyrl_train.entrypoints.runtime import collect_rarely, compute_thread


def test_one_thread_has_all_cores_meanwhile() -> None:
    n_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compute_thread() as executor:
            assert torch.get_num_threads() == 1
            assert executor.submit(torch.get_num_threads).result() == 2
            assert {executor.submit(threading.get_ident).result() for _ in range(5)} != {threading.get_ident()}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(n_before)
    assert not any(thread.name.startswith("compute") for thread in threading.enumerate())


def test_the_garbage_collector_is_as_it_was() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with collect_rarely():
        assert gc.get_threshold()[0] > before[0][0]
        assert gc.get_freeze_count() > before[1]
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
