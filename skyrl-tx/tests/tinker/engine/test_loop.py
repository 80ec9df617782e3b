"""The engine's loop: all accepted requests are answered, and none costs others their turn."""

from typing import Any

import pytest
from tx_kit.engines import Desk
from tx_kit.models import MINIMAL_CONTEXT

from tx.tinker.db_models import STALLED, EngineState, RequestStatus, TxRequest
from tx.tinker.engine import queue
from tx.tinker.store.queries import cancel_sample


@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 127, 128])
def test_a_cache_of_one_context_is_enough(desk: Desk, n_prompt: int) -> None:
    """Nothing within the limits waits forever, whatever part of the cache's pages of 64 the prompt fills."""
    desk.start(cache_gib=(MINIMAL_CONTEXT * 64) / (1 << 30))
    max_prompt = min(MINIMAL_CONTEXT, desk.backend.base_model.max_context)
    samples = [desk.sample([1] * min(n_prompt, max_prompt), max_tokens=None, num_samples=2) for _ in range(2)]
    desk.work()
    assert all(desk.result(one) for one in samples)


def test_cancelled_requests_are_skipped_at_once(desk: Desk) -> None:
    model = desk.model()
    desk.work()
    ids = [desk.step(model) for _ in range(3)]
    desk.fetch()
    for one in ids:
        desk.set(TxRequest, one, status=RequestStatus.CANCELLED)
    assert [desk.engine.work() for _ in range(4)] == [True, True, True, False]


def test_cancelled_samples_make_room(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CHECK_INTERVAL_SEC", 0.0)
    ids = [desk.sample(max_tokens=100, num_samples=4) for _ in range(3)]
    desk.fetch()
    desk.engine.work()
    assert len(desk.engine._sampling) == 3
    for one in ids[:2]:
        desk.change(lambda db, one=one: cancel_sample(db, one))
    desk.fetch()  # the server rings
    desk.engine.work()
    assert len(desk.engine._sampling) == 1
    desk.work()
    assert [desk.row(one).status.value for one in ids] == ["cancelled", "cancelled", "done"]
    assert desk.engine._queue.begun == set()


# -- suspects: requests that were running each time an engine died


def test_a_step_that_is_given_up_drops_its_gradients(desk: Desk) -> None:
    model, twin = desk.models()
    step = desk.train(model, [7, 8])
    desk.set(TxRequest, step, n_tries=queue.MAX_TRIES)
    for one in (model, twin):
        desk.train(one)
    losses = [desk.score(one) for one in (model, twin)]
    desk.work()
    assert desk.row(step).status is RequestStatus.FAILED
    assert desk.loss(losses[0]) == desk.loss(losses[1])


# -- requests accepted before the model's limits were known


@pytest.fixture
def unlimited(desk: Desk) -> Desk:
    """A desk whose server does not know the model's limits yet."""
    desk.change(lambda db: [db.delete(one) for one in [db.get(EngineState, 1)] if one is not None])
    return desk


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"prompt": [1, 64]}, "prompt has token 64; the vocabulary is 0 to 63"),
        ({"prompt": [1] * 129, "max_tokens": None}, "exceed the model's 128"),
        ({"max_tokens": 2**31 - 1}, "max_tokens=2147483647 exceed the model's 128 positions"),
    ],
)
def test_samples_that_do_not_fit(unlimited: Desk, params: dict[str, Any], words: str) -> None:
    wrong, right = unlimited.sample(**params), unlimited.sample()
    unlimited.work()
    category, message = unlimited.error(wrong)
    assert (category, words in message) == ("user", True)
    assert unlimited.result(right)


def test_passes_that_do_not_fit(unlimited: Desk) -> None:
    model = unlimited.model()
    wrong = [unlimited.run_pass(model, tokens) for tokens in ([1] * 200, [1, 99])]
    right = unlimited.run_pass(model)
    unlimited.work()
    assert [unlimited.row(one).error_category for one in wrong] == ["user", "user"]
    assert unlimited.loss(right) > 0


def test_it_reports_its_state(desk: Desk) -> None:
    desk.model()
    desk.sample()
    desk.work()
    desk.report()
    state = desk.state()
    assert state.max_context == MINIMAL_CONTEXT
    assert state.status["tokens_sampled"] == 4
    assert state.status["models"] == ["s:train:0"]
    assert state.status["requests"] == {"create_model": 1, "sample": 1}


def test_it_reports_how_long_its_loop_has_been_stuck(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoring and compiling are progress, however long they take."""
    desk.work()
    desk.report()

    def beat_after_100_s(*, is_compiling: bool = False) -> int:
        """Let 100 s pass; return for how long the engine then seems to be stuck."""
        before = desk.state().last_seen_at
        desk.engine._progress_at -= 100
        desk.engine._state_at -= 100
        with monkeypatch.context() as patch:
            patch.setattr(type(desk.backend), "is_compiling", is_compiling)
            desk.engine.beat()
        state = desk.state()
        assert state.last_seen_at > before
        return int(state.status[STALLED])

    assert beat_after_100_s() == 0  # it restores models
    desk.engine._is_serving = True
    assert [beat_after_100_s(), beat_after_100_s()] == [100, 200]
    assert [beat_after_100_s(is_compiling=True), beat_after_100_s()] == [0, 100]
    desk.sample()
    desk.work()
    assert 100 <= beat_after_100_s() < 200  # since its last slice, which may have been slow
