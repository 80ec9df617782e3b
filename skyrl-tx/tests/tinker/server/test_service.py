import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from tx_kit.servers import SAMPLE, SECONDS, config_for, serving

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


async def test_polls_do_not_wait_for_slow_work(tmp_path: Path) -> None:
    shared = service.Service(config_for(tmp_path))
    is_over = threading.Event()
    slow = [asyncio.create_task(shared.compute(is_over.wait)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(shared.read(lambda db: 1), SECONDS) == 1
    is_over.set()
    await asyncio.gather(*slow)
    shared.close()


def test_accepted_training_survives_a_power_loss(tmp_path: Path) -> None:
    """A commit with synchronous=FULL also makes those before it durable, e.g. samples."""
    with serving(tmp_path) as running:
        if running.service.database.dialect.name != "sqlite":
            pytest.skip("every commit to PostgreSQL is durable")
        model_id = running.model()
        settings: dict[object, str] = {}

        def record(_: object, cursor: Any, statement: str, *__: object) -> None:
            if statement.startswith("PRAGMA synchronous="):
                settings[cursor.connection] = statement.rpartition("=")[2]
            if statement.startswith("INSERT INTO requests"):
                accepted.append(settings[cursor.connection])

        accepted: list[str] = []
        event.listen(running.service.database, "before_cursor_execute", record)
        with running.client() as http:
            assert http.post("optim_step", json={"model_id": model_id, "adam_params": {}}).status_code == 200
            assert http.post("asample", json=SAMPLE).status_code == 200
    assert accepted == ["FULL", "NORMAL"]
