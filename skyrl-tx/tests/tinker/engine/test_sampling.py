from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tx_kit.engines import Desk

from tx.tinker.backends.base import Done
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.engine import queue
from tx.tinker.store.queries import cancel_sample
from tx.tinker.types import Sample, SampleRequest, SampleResult


class Careless(JaxBackend):
    """Reports results of cancelled requests and, for token 13, results that no message can contain."""

    def sample(self, request: SampleRequest, weights: Any, done: Done) -> Callable[[], None]:
        def report(result: SampleResult | Exception) -> None:
            done(SampleResult([Sample(["?"], [0.0], is_stopped=False)]) if 13 in request.prompt else result)  # type: ignore[list-item]

        super().sample(request, weights, report)
        return lambda: None


@pytest.fixture
def careless(tmp_path: Path, minimal_model: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, minimal_model, kind=Careless)
    yield desk
    desk.close()


def test_a_result_after_a_cancellation(careless: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CHECK_INTERVAL_SEC", 0.0)
    cancelled = careless.sample(max_tokens=100)
    careless.fetch()
    careless.engine.work()
    careless.change(lambda db: cancel_sample(db, cancelled))
    careless.fetch()
    while careless.engine.work():
        pass
    assert careless.engine._queue.begun == set()
    assert careless.row(cancelled).result is None


def test_a_result_that_cannot_be_serialized(careless: Desk, caplog: pytest.LogCaptureFixture) -> None:
    wrong, right = careless.sample([13]), careless.sample()
    careless.work()
    assert careless.row(wrong).error_category == "server"
    assert f"request {wrong} (sample) failed" in caplog.text
    assert careless.result(right)
