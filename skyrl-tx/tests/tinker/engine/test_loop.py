"""The engine's handling of accepted requests: none ends the engine, or costs others their turn."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from tx_kit.engines import CONTEXT, Desk, new_backend

from tx.tinker.backends.base import Save
from tx.tinker.backends.jax.backend import JaxBackend
from tx.tinker.db_models import STALLED, EngineState, Model, ModelStatus, Request, RequestStatus
from tx.tinker.engine import loop, queue
from tx.tinker.store.queries import cancel_sample, pending_ids
from tx.tinker.submission.training import (
    load_weights,
    save_weights,
    save_weights_for_sampler,
    unload_model,
)
from tx.tinker.types import Pass, PassResult, SampleRequest
from tx.tinker.wire import requests as wire


def test_it_learns(desk: Desk) -> None:
    model = desk.model(desk.session())
    passes = []
    for _ in range(3):
        passes.append(desk.train(model))
        desk.step(model)
    desk.work()
    losses = [desk.loss(one) for one in passes]
    assert losses[0] > losses[1] > losses[2]


def test_requests_of_a_model_run_in_order(desk: Desk) -> None:
    model = desk.model(desk.session())
    ids = [desk.train(model), desk.step(model), desk.train(model, is_forward_only=True)]
    desk.work()
    times = [desk.row(one).completed_at for one in ids]
    assert times == sorted(times)  # type: ignore[type-var]
    assert desk.loss(ids[2]) < desk.loss(ids[0])


def test_a_forward_pass_does_not_delay_a_restore_point(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = desk.model(desk.session())
    desk.train(model)
    last_step = desk.step(model)
    desk.train(model, is_forward_only=True)
    desk.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
    desk.engine._write_points()
    desk.engine._points.wait()
    assert desk.change(lambda db: db.get_one(Model, model).restored_until) == last_step


def test_gradients_delay_a_restore_point(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    model = desk.model(desk.session())
    desk.step(model)
    desk.train(model)
    desk.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
    desk.engine._write_points()
    desk.engine._points.wait()
    assert desk.change(lambda db: db.get_one(Model, model).restored_until) == 0


@pytest.fixture
def disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """A slow disk, which writes when the event is set."""
    is_ready = Event()
    freeze = desk.backend.freeze

    def freeze_slowly(model_id: str, *, with_optimizer: bool) -> Save:
        save = freeze(model_id, with_optimizer=with_optimizer)
        return lambda folder: (is_ready.wait(60), save(folder))[1]

    monkeypatch.setattr(desk.backend, "freeze", freeze_slowly)
    yield is_ready
    is_ready.set()


def test_saves_delay_only_their_own_model(desk: Desk, disk: Event) -> None:
    session = desk.session()
    model, twin = (desk.model(session, number) for number in range(2))
    for one in (model, twin):
        desk.train(one)
        desk.step(one)
    save = desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=model, path="x")))
    waiting = desk.step(model)
    others = [desk.train(twin), desk.step(twin), desk.sample()]
    desk.engine._queue.fetch()
    while any(desk.row(one).status is RequestStatus.PENDING for one in others):
        desk.engine.work()
    assert [desk.row(one).status for one in (save, waiting)] == [RequestStatus.PENDING] * 2
    disk.set()
    desk.work()
    assert desk.result(save)
    assert desk.result(waiting)
    saved = wire.LoadWeightsRequest(
        path=f"tinker://{model}/weights/x", optimizer=True, session_id=session, model_seq_id=2
    )
    desk.submit(lambda to: load_weights(to, saved))
    desk.step(f"{session}:train:2")
    losses = [desk.train(one, is_forward_only=True) for one in (model, f"{session}:train:2")]
    desk.work()
    assert desk.loss(losses[0]) == desk.loss(losses[1])


def test_a_restore_point_is_written_while_its_model_trains(
    desk: Desk, disk: Event, monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    """It holds the state of its step, not of later ones."""
    model = desk.model(desk.session())
    desk.train(model)
    step = desk.step(model)
    desk.engine._queue.fetch()
    while desk.row(step).status is RequestStatus.PENDING:
        desk.engine.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
    desk.engine._write_points()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 60.0)
    later = [desk.train(model, [7, 8]), desk.step(model), desk.train(model, is_forward_only=True)]
    desk.engine._queue.fetch()
    while desk.row(later[-1]).status is RequestStatus.PENDING:
        desk.engine.work()
    assert desk.change(lambda db: db.get_one(Model, model).restored_until) == 0
    disk.set()
    desk.engine._points.wait()
    assert desk.change(lambda db: db.get_one(Model, model).restored_until) == step
    desk.start(new_backend(tiny_model))
    desk.engine._points.restore()
    restored = desk.train(model, is_forward_only=True)
    desk.work()
    assert desk.loss(restored) == desk.loss(later[-1])


def test_it_reports_its_state(desk: Desk) -> None:
    desk.model(desk.session())
    desk.sample()
    desk.work()
    desk.engine._state_at = 0.0
    desk.engine._report()
    state = desk.change(lambda db: db.get_one(EngineState, 1))
    assert state.max_context == CONTEXT
    assert state.status["tokens_sampled"] == 4
    assert state.status["models"] == ["s:train:0"]
    assert state.status["requests"] == {"create_model": 1, "sample": 1}


def test_it_reports_how_long_its_loop_has_been_stuck(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restoring and compiling are progress, however long they take."""
    desk.work()
    desk.engine._state_at = 0.0
    desk.engine._report()

    def beat(*, is_compiling: bool = False) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(type(desk.backend), "is_compiling", is_compiling)
            desk.engine._progress_at -= 100
            desk.engine._state_at -= 100
            before = desk.change(lambda db: db.get_one(EngineState, 1).last_seen_at)
            desk.engine.beat()
            state = desk.change(lambda db: db.get_one(EngineState, 1))
        assert state.last_seen_at > before
        return state.status[STALLED]

    assert beat() == 0
    desk.engine._is_serving = True
    assert [beat(), beat(), beat(is_compiling=True), beat()] == [100, 200, 0, 100]
    desk.sample()
    desk.work()
    assert beat() == 100


def test_a_full_disk_fails_single_requests(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = desk.model(desk.session())
    step = desk.step(model)
    desk.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(desk.backend, "freeze", lambda model_id, *, with_optimizer: full)
    desk.engine._write_points()
    desk.engine._points.wait()
    assert "the restore point of model s:train:0" in caplog.text
    save = desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=model, path="full")))
    desk.work()
    assert desk.row(step).status is RequestStatus.DONE
    assert "No space left" in (desk.row(save).error or "")
    assert not [path for path in desk.config.checkpoints_base.rglob("*") if path.name.startswith(".unfinished")]


def test_writes_that_would_fill_the_disk_are_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path, new_backend(tiny_model), min_free_bytes=1 << 60)
    model = desk.model(desk.session())
    step = desk.step(model)
    saves = [
        desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=model, path="full"))),
        desk.submit(
            lambda to: save_weights_for_sampler(
                to, wire.SaveWeightsForSamplerRequest(model_id=model, sampling_session_seq_id=1)
            )
        ),
    ]
    desk.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
    desk.engine._write_points()
    desk.engine._points.wait()
    refusal = r"GiB free, and 0\.0 GiB are to be written; 1073741824\.0 GiB must stay free \(--min-free-bytes\)"
    assert re.search(f"the restore point of model s:train:0 could not be written: .* {refusal}", caplog.text)
    assert desk.result(step)
    for one in saves:
        assert re.search(f"the disk of {tmp_path} has .* {refusal}. Delete checkpoints", desk.row(one).error or "")
        assert desk.row(one).error_category == "server"
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
    desk.close()


def test_waiting_writes_count_when_space_is_checked(desk: Desk, disk: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two saves wait for the disk, which has space for one."""
    session = desk.session()
    models = [desk.model(session, number) for number in range(2)]
    desk.work()
    n_bytes = desk.backend.n_bytes(models[0], with_optimizer=True)

    def usage(folder: Path) -> SimpleNamespace:
        written = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        return SimpleNamespace(free=desk.config.min_free_bytes + 1.5 * n_bytes - written)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    saves = [
        desk.submit(lambda to, one=one: save_weights(to, wire.SaveWeightsRequest(model_id=one, path="x")))  # type: ignore[misc]
        for one in models
    ]
    desk.engine._queue.fetch()
    while len(desk.engine._saves) < 2:
        desk.engine.work()
    disk.set()
    desk.work()
    assert [desk.row(one).status for one in saves] == [RequestStatus.DONE, RequestStatus.FAILED]
    assert "must stay free (--min-free-bytes)" in (desk.row(saves[1]).error or "")


def test_a_failed_restore_point_is_not_retried_after_every_step(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("the device is out of memory")

    model = desk.model(desk.session())
    desk.step(model)
    desk.work()
    monkeypatch.setattr(desk.backend, "freeze", lambda model_id, *, with_optimizer: fail)
    desk.engine._points._written[model] = -1e9, 0.0
    for _ in range(3):
        step = desk.step(model)
        desk.work()
        assert desk.result(step)
    assert caplog.text.count("the restore point of model s:train:0 could not be written") == 1
    assert caplog.text.count("RuntimeError: the device is out of memory") == 1


def test_unloading_does_not_wait_for_files_of_other_models(
    desk: Desk, disk: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = desk.session()
    saved, unloaded = (desk.model(session, number) for number in range(2))
    desk.work()
    desk.submit(lambda to: save_weights(to, wire.SaveWeightsRequest(model_id=saved, path="x")))
    step = desk.step(unloaded)
    desk.engine._queue.fetch()
    while desk.row(step).status is RequestStatus.PENDING:
        desk.engine.work()
    monkeypatch.setattr(loop, "POINT_DELAY_SECONDS", 0.0)
    desk.engine._write_points()
    unload = desk.submit(lambda to: unload_model(to, wire.ModelRequest(model_id=unloaded)))
    desk.engine._queue.fetch()
    while desk.row(unload).status is RequestStatus.PENDING:
        desk.engine.work()
    assert not desk.engine._saves[saved].outcome.done()
    disk.set()
    desk.work()


def test_cancelled_requests_are_skipped_at_once(desk: Desk) -> None:
    model = desk.model(desk.session())
    desk.work()
    ids = [desk.step(model) for _ in range(3)]
    desk.engine._queue.fetch()
    for one in ids:
        desk.change(lambda db, one=one: setattr(db.get_one(Request, one), "status", RequestStatus.CANCELLED))
    assert [desk.engine.work() for _ in range(4)] == [True, True, True, False]


def test_a_suspect_runs_alone(desk: Desk) -> None:
    model = desk.model(desk.session())
    desk.work()
    suspect = desk.sample(max_tokens=50)
    desk.change(lambda db: setattr(db.get_one(Request, suspect), "n_tries", queue.MAX_SHARED_TRIES))
    others = [desk.sample(), desk.train(model)]
    desk.engine._queue.fetch()
    n_turns = 0
    while desk.row(suspect).status is RequestStatus.PENDING:
        desk.engine.work()
        assert [desk.row(one).n_tries for one in others] == [0, 0]
        n_turns += 1
    assert n_turns > 1
    desk.work()
    assert all(desk.result(one) for one in others)


# -- requests accepted before the model's limits were known


def unchecked(desk: Desk, submit: Callable[[], int]) -> int:
    """Queue a request like a server that does not know the model's limits yet."""
    desk.change(lambda db: [db.delete(one) for one in [db.get(EngineState, 1)] if one is not None])
    return submit()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"prompt": [1, 64]}, "prompt has token 64; the vocabulary is 0 to 63"),
        ({"prompt": [1] * 129, "max_tokens": None}, "exceed the model's 128"),
        ({"max_tokens": 2**31 - 1}, "max_tokens=2147483647 exceed the model's 128 positions"),
    ],
)
def test_samples_that_do_not_fit(desk: Desk, params: dict[str, Any], words: str) -> None:
    wrong = unchecked(desk, lambda: desk.sample(**params))
    right = desk.sample()
    desk.work()
    assert words in (desk.row(wrong).error or "")
    assert desk.row(wrong).error_category == "user"
    assert desk.result(right)


def test_passes_that_do_not_fit(desk: Desk) -> None:
    model = desk.model(desk.session())
    wrong = [unchecked(desk, lambda: desk.train(model, [1] * 200)), unchecked(desk, lambda: desk.train(model, [1, 99]))]
    right = desk.train(model)
    desk.work()
    assert [desk.row(one).error_category for one in wrong] == ["user", "user"]
    assert desk.loss(right) > 0


@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 100, 127, 128])
def test_a_cache_of_one_context_is_enough(desk: Desk, tiny_model: Path, n_prompt: int) -> None:
    """Nothing within the limits waits forever."""
    desk.start(new_backend(tiny_model, cache_gib=(CONTEXT * 64) / (1 << 30)))
    max_prompt = min(CONTEXT, desk.backend.base_model.max_context)
    samples = [desk.sample([1] * min(n_prompt, max_prompt), max_tokens=None, num_samples=2) for _ in range(2)]
    desk.work()
    assert all(desk.result(one) for one in samples)


def test_cancelled_samples_make_room(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "CHECK_INTERVAL_SEC", 0.0)
    ids = [desk.sample(max_tokens=100, num_samples=4) for _ in range(3)]
    desk.engine._queue.fetch()
    desk.engine.work()
    assert len(desk.engine._sampling) == 3
    for one in ids[:2]:
        desk.change(lambda db, one=one: cancel_sample(db, one))
    desk.engine._queue.fetch()  # the server rings
    desk.engine.work()
    assert len(desk.engine._sampling) == 1
    desk.work()
    assert [desk.row(one).status.value for one in ids] == ["cancelled", "cancelled", "done"]
    assert desk.engine._queue.begun == set()


# -- errors of a backend


class Faulty(JaxBackend):
    """Fails to train on token 13, and dies of it in a prompt."""

    is_dying = False

    def compute(self, pass_: Pass) -> Iterator[PassResult | None]:
        if any(13 in datum.tokens for datum in pass_.data):
            raise ZeroDivisionError("13")
        yield from super().compute(pass_)

    def sample(self, request: SampleRequest, weights: Any, done: Any) -> Callable[[], None]:
        self.is_dying = self.is_dying or 13 in request.prompt
        return super().sample(request, weights, done)

    def step(self) -> bool:
        if self.is_dying:
            raise MemoryError("by test")
        return super().step()


@pytest.fixture
def faulty(tmp_path: Path, tiny_model: Path) -> Iterator[Desk]:
    made = Desk(tmp_path, new_backend(tiny_model, kind=Faulty))
    yield made
    made.close()


def test_an_error_fails_a_single_pass(faulty: Desk) -> None:
    session = faulty.session()
    models = [faulty.model(session, number) for number in range(2)]
    wrong, right, after = faulty.train(models[0], [12, 13, 1]), faulty.train(models[1]), faulty.train(models[0])
    faulty.work()
    assert (faulty.row(wrong).error, faulty.row(wrong).error_category) == ("ZeroDivisionError: 13", "server")
    assert faulty.loss(right) == faulty.loss(after)


def test_a_step_after_a_failed_pass_fails_as_a_whole(faulty: Desk, tiny_model: Path) -> None:
    """The client may have sent it before it knew, and the other passes may be parts of the same call."""
    session = faulty.session()
    model, twin = (faulty.model(session, number) for number in range(2))
    ids = [faulty.train(model), faulty.train(model, [12, 13, 1]), faulty.train(model, [7, 8]), faulty.step(model)]
    faulty.work()
    step = faulty.row(ids[-1])
    assert f"the step was not applied, because forward_backward request {ids[1]} before it failed" in (step.error or "")
    assert "ZeroDivisionError: 13. All gradients since the previous step were dropped" in (step.error or "")
    assert step.error_category == "server"
    for one in (model, twin):
        faulty.train(one, [3, 4])
        assert faulty.step(one)
    faulty.work()
    losses = [faulty.train(one, [5, 6], is_forward_only=True) for one in (model, twin)]
    faulty.work()
    assert faulty.loss(losses[0]) == faulty.loss(losses[1])
    faulty.start(new_backend(tiny_model))
    faulty.engine._points.restore()
    restored = faulty.train(model, [5, 6], is_forward_only=True)
    faulty.work()
    assert faulty.loss(restored) == faulty.loss(losses[0])


def test_a_failed_forward_pass_does_not_fail_the_step(faulty: Desk) -> None:
    model = faulty.model(faulty.session())
    faulty.train(model)
    failed = faulty.train(model, [12, 13, 1], is_forward_only=True)
    step = faulty.step(model)
    faulty.work()
    assert faulty.row(failed).status is RequestStatus.FAILED
    assert faulty.result(step)


def test_a_step_that_is_given_up_drops_its_gradients(desk: Desk) -> None:
    session = desk.session()
    model, twin = (desk.model(session, number) for number in range(2))
    desk.train(model, [7, 8])
    step = desk.step(model)
    desk.change(lambda db: setattr(db.get_one(Request, step), "n_tries", queue.MAX_TRIES))
    for one in (model, twin):
        desk.train(one)
        desk.step(one)
    losses = [desk.train(one, is_forward_only=True) for one in (model, twin)]
    desk.work()
    assert desk.row(step).status is RequestStatus.FAILED
    assert desk.loss(losses[0]) == desk.loss(losses[1])


def test_requests_that_kill_engines_are_given_up(
    faulty: Desk, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = faulty.session()
    model = faulty.model(session)
    faulty.work()
    innocent = [faulty.sample(), faulty.train(model), faulty.step(model)]
    deadly = faulty.sample([13])
    last = faulty.sample([5])
    faulty.start(new_backend(tiny_model, kind=Faulty))
    n_deaths = 0
    while True:
        try:
            faulty.engine.run(lambda: not faulty.change(pending_ids))
        except MemoryError:
            n_deaths += 1
            faulty.start(new_backend(tiny_model, kind=Faulty))
            continue
        break
    assert n_deaths == 3
    assert "the engine died 3 times" in (faulty.row(deadly).error or "")
    assert faulty.row(deadly).error_category == "server"
    for one in (*innocent, last):
        assert faulty.result(one)


# -- models


def test_a_model_that_cannot_be_created(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("no room")

    session = desk.session()
    monkeypatch.setattr(desk.backend, "create_model", full)
    model = desk.model(session)
    desk.work()
    monkeypatch.undo()
    assert desk.change(lambda db: db.get_one(Model, model).status) is ModelStatus.FAILED
    other = desk.model(session, 1)
    desk.work()
    assert list(desk.backend.models()) == [other]


def test_a_model_whose_creation_was_given_up_does_not_count(desk: Desk) -> None:
    model = desk.model(desk.session())
    desk.change(lambda db: setattr(db.get_one(Request, 1), "n_tries", queue.MAX_TRIES))
    desk.work()
    assert "the engine died 3 times" in (desk.row(1).error or "")
    assert desk.change(lambda db: db.get_one(Model, model).status) is ModelStatus.FAILED


def test_models_take_turns(desk: Desk, tiny_model: Path) -> None:
    """A model with many requests does not delay one with few."""
    desk.start(new_backend(tiny_model, micro_batch_tokens=1))
    session = desk.session()
    busy, quick = desk.model(session, 0), desk.model(session, 1)
    much = desk.train(busy, n_data=12)  # one micro-batch each
    little = [desk.train(quick), desk.step(quick), desk.train(quick)]
    desk.work()
    done = [desk.row(one).completed_at for one in (*little, much)]
    assert done == sorted(done)  # type: ignore[type-var]
