from __future__ import annotations

import asyncio

import pytest

from tx.tinker.server import service


async def test_failed_tasks_are_restarted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(service, "RESTART_SEC", 0.01)
    n_begun = 0
    is_well = asyncio.Event()

    async def work() -> None:
        nonlocal n_begun
        n_begun += 1
        if n_begun < 3:
            raise RuntimeError("can't start new thread")
        is_well.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(service.run_forever(work))
    await asyncio.wait_for(is_well.wait(), 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert n_begun == 3
    assert [one.exc_text is not None for one in caplog.records] == [True, True]
