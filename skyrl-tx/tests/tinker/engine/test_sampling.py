from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tx_kit.engines import Desk, new_backend

from tx.tinker.backends.base import Done
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.db_models import Request
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
def careless(tmp_path: Path, tiny_model: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, new_backend(tiny_model, kind=Careless))
    yield made
    made.close()


def test_a_result_after_a_cancellation(careless: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CHECK_INTERVAL_SEC", 0.0)
    cancelled = careless.sample(max_tokens=100)
    careless.engine._queue.fetch()
    careless.engine.work()
    careless.change(lambda db: cancel_sample(db, cancelled))
    careless.engine._queue.fetch()
    while careless.engine.work():
        pass
    assert careless.engine._queue.begun == set()
    assert careless.row(cancelled).result is None


def test_users_take_turns(desk: Desk, tiny_model: Path) -> None:
    """A user with a single sample does not wait for all requests of another user."""
    desk.start(new_backend(tiny_model, sample_lanes=4, sample_groups=1))
    many = [desk.sample(num_samples=4) for _ in range(9)]
    few = desk.sample(num_samples=4)
    desk.change(lambda db: setattr(db.get_one(Request, few), "owner", "another"))
    desk.work()
    n_before = sum(desk.row(one).completed_at < desk.row(few).completed_at for one in many)
    assert n_before <= 2


def test_a_result_that_cannot_be_serialized(careless: Desk, caplog: pytest.LogCaptureFixture) -> None:
    wrong, right = careless.sample([13]), careless.sample()
    careless.work()
    assert careless.row(wrong).error_category == "server"
    assert f"request {wrong} (sample) failed" in caplog.text
    assert careless.result(right)
