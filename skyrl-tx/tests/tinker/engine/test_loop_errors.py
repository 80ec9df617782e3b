"""Errors of a backend: they fail single requests, and end neither the engine nor other requests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tx_kit.engines import Desk

from tx.tinker.backends.base import Done
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.db_models import ModelStatus, RequestStatus
from tx.tinker.engine import queue
from tx.tinker.store.queries import cancel_sample, pending_ids
from tx.tinker.types import Pass, PassResult, Sample, SampleRequest, SampleResult


class Faulty(JaxBackend):
    """Fails to train on token 13, dies of it in a prompt, and reports results of cancelled samples.

    For prompts with token 14, it reports results that no message can contain.
    """

    is_dying = False

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        if any(13 in datum.tokens for datum in pass_.data):
            raise ZeroDivisionError("13")
        yield from super().compute(pass_)

    def sample(self, request: SampleRequest, weights: Any, done: Done) -> Callable[[], None]:
        self.is_dying = self.is_dying or 13 in request.prompt

        def report(result: SampleResult | Exception) -> None:
            done(SampleResult([Sample(["?"], [0.0], is_stopped=False)]) if 14 in request.prompt else result)  # type: ignore[list-item]

        super().sample(request, weights, report)
        return lambda: None

    def step(self) -> bool:
        if self.is_dying:
            raise MemoryError("by test")
        return super().step()


@pytest.fixture
def faulty(new_desk: Callable[..., Desk]) -> Desk:
    return new_desk(kind=Faulty)


def test_a_step_after_a_failed_pass_fails_as_a_whole(faulty: Desk) -> None:
    """The client may have sent it before it knew, and the other passes may be parts of the same call."""
    model, twin = faulty.models()
    faulty.run_pass(model)
    failed = faulty.run_pass(model, [12, 13, 1])
    faulty.run_pass(model, [7, 8])
    step = faulty.step(model)
    faulty.work()
    category, message = faulty.error(step)
    assert category == "server"
    assert f"the step was not applied, because forward_backward request {failed} before it failed" in message
    assert "ZeroDivisionError: 13. All gradients since the previous step were dropped" in message
    for one in (model, twin):
        faulty.train(one, [3, 4])
    losses = [faulty.current_loss(one) for one in (model, twin)]
    assert losses[0] == losses[1]
    faulty.restart()
    assert faulty.current_loss(model) == losses[0]


def test_a_failed_forward_pass_does_not_fail_the_step(faulty: Desk) -> None:
    model = faulty.model()
    faulty.run_pass(model)
    failed, step = faulty.score(model, [12, 13, 1]), faulty.step(model)
    faulty.work()
    assert faulty.row(failed).status is RequestStatus.FAILED
    assert faulty.result(step)


def test_a_result_after_a_cancellation(faulty: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CHECK_INTERVAL_SEC", 0.0)
    cancelled = faulty.sample(max_tokens=100)
    faulty.fetch()
    faulty.engine.work()
    faulty.change(lambda db: cancel_sample(db, cancelled))
    faulty.fetch()
    while faulty.engine.work():
        pass
    assert faulty.engine._queue.begun == set()
    assert faulty.row(cancelled).result is None


def test_a_result_that_cannot_be_serialized(faulty: Desk, caplog: pytest.LogCaptureFixture) -> None:
    wrong, right = faulty.sample([14]), faulty.sample()
    faulty.work()
    assert faulty.row(wrong).error_category == "server"
    assert f"request {wrong} (sample) failed" in caplog.text
    assert faulty.result(right)


def test_requests_that_kill_engines_are_given_up(faulty: Desk) -> None:
    model = faulty.model()
    faulty.work()
    innocent = [faulty.sample(), faulty.run_pass(model), faulty.step(model)]
    deadly = faulty.sample([13])
    innocent.append(faulty.sample([5]))
    n_deaths = 0
    while faulty.change(pending_ids):
        faulty.start()
        try:
            faulty.engine.run(lambda: not faulty.change(pending_ids))
        except MemoryError:
            n_deaths += 1
    assert n_deaths == 3
    category, message = faulty.error(deadly)
    assert (category, "the engine died 3 times" in message) == ("server", True)
    assert all(faulty.result(one) for one in innocent)


def test_a_model_that_cannot_be_created(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    session = desk.session()
    with monkeypatch.context() as patch:
        patch.setattr(desk.backend, "create_model", fail)
        model = desk.model(session)
        desk.work()
    assert desk.model_row(model).status is ModelStatus.FAILED
    other = desk.model(session, 1)
    desk.work()
    assert list(desk.backend.models()) == [other]
