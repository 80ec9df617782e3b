import os
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from train_kit.batches import random_batch
from train_kit.ranks import SharedRanks, load_group, load_policy, new_ranks, spec
from train_kit.workers import config

from skyrl_train.errors import StalledError, WorkerError
from skyrl_train.watchdog import Watchdog


async def test_a_killed_rank_fails_the_call_by_name_and_breaks_the_group(tiny_model_path: Path) -> None:
    async with new_ranks(2) as ranks:
        group = await load_policy(ranks, tiny_model_path)
        ranks[1]._process.kill()
        ended = r"rank 1 \(process \d+\) ended with exit status -9 \(Killed\) during score"
        with pytest.raises(WorkerError, match=ended):
            await group.score(random_batch(1))
        with pytest.raises(WorkerError, match=r"the policy is unusable after .*rank 1"):
            await group.score(random_batch(1))
    assert not any(rank._process.is_alive() for rank in ranks)


async def test_a_rank_that_hangs_is_named_and_breaks_the_group(
    tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_ranks(2) as ranks:
        group = await load_policy(ranks, tiny_model_path)
        program = max(psutil.Process().children(recursive=True), key=lambda process: process.create_time())
        program.suspend()
        message = r"model \(rank \d of the policy, facts\): no answer"
        with Watchdog(tmp_path, 0.3, 1.0), pytest.raises(StalledError, match=message):
            await group._call("facts")
        program.kill()
        with pytest.raises(WorkerError, match=r"the policy is unusable after StalledError"):
            await group.is_finite()
    assert "model: 1 waiting" in caplog.text


async def test_a_rank_that_aborts_prints_its_stack(tiny_model_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    aborting = replace(spec("ref", tiny_model_path, config().trainer), load=os.abort)
    async with new_ranks(1) as ranks:
        with pytest.raises(WorkerError, match=r"rank 0 \(process \d+\) ended with exit status -6 \(Aborted\) during"):
            await load_group(ranks, aborting)
    stack = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in stack
    assert "launch/process.py" in stack


async def test_shared_ranks_that_have_ended_are_replaced(tiny_model_path: Path) -> None:
    shared = SharedRanks()
    with shared.borrow(1) as first:
        first[0]._process.kill()
        first[0]._process.join()
    with shared.borrow(1) as second:
        assert await (await load_policy(second, tiny_model_path)).is_finite()
    shared.close()
