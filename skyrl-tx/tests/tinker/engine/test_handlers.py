"""Everything that is done for a model but to train it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tx_engine import Desk

from tx.tinker import submission
from tx.tinker.checkpoint_files import checkpoint_folder
from tx.tinker.db_models import Checkpoint, Model, ModelStatus, SamplingSession
from tx.tinker.wire import requests as wire
from tx.tinker.wire import tinker_pb2 as pb


@pytest.fixture
def model(desk: Desk) -> str:
    """One that has learned a little."""
    name = desk.model(desk.session())
    desk.train(name)
    desk.step(name)
    desk.work()
    return name


def save(desk: Desk, model: str, path: str | None = "x", **told: Any) -> int:
    asked = wire.SaveWeightsRequest(model_id=model, path=path, **told)
    return desk.submit(lambda to: submission.save_weights(to, asked))


def save_for_sampler(desk: Desk, model: str, path: str | None = None, **told: Any) -> int:
    asked = wire.SaveWeightsForSamplerRequest(model_id=model, path=path, **told)
    return desk.submit(lambda to: submission.save_weights_for_sampler(to, asked))


def load(desk: Desk, path: str, number: int, *, optimizer: bool = False) -> str:
    asked = wire.LoadWeightsRequest(path=path, optimizer=optimizer, session_id="s", model_seq_id=number)
    desk.submit(lambda to: submission.load_weights(to, asked))
    desk.work()
    return f"s:train:{number}"


def error(desk: Desk, request_id: int) -> tuple[str | None, str | None]:
    row = desk.row(request_id)
    return row.error_category, row.error


def told(desk: Desk, model: str) -> float:
    asked = desk.train(model, [7, 8, 9], is_forward_only=True)
    desk.work()
    return desk.loss(asked)


def test_seeds_are_chosen_and_kept(desk: Desk) -> None:
    session = desk.session()
    for number, seed in enumerate((None, None, -5, 2**64 - 1)):
        desk.model(session, number, seed=seed)
    desk.work()
    assert len({desk.backend.models()[f"s:train:{number}"].seed for number in range(4)}) == 4
    assert all(desk.change(lambda db, n=n: db.get_one(Model, f"s:train:{n}").status) == "ready" for n in range(4))


def test_a_checkpoint(desk: Desk, model: str) -> None:
    saved = save(desk, model, ttl_seconds=3600, user_metadata={"a": "b"})
    desk.work()
    path = f"tinker://{model}/weights/x"
    assert json.loads(desk.result(saved))["path"] == path
    row = desk.change(lambda db: db.get_one(Checkpoint, (model, "weights", "x")))
    assert row.expires_at is not None
    assert (row.expires_at - row.created_at).total_seconds() == pytest.approx(3600, abs=5)
    files = list(checkpoint_folder(desk.config, path).iterdir())
    assert (row.size_bytes, row.user_metadata) == (sum(file.stat().st_size for file in files), {"a": "b"})
    assert told(desk, load(desk, path, 1)) == told(desk, model)


def test_a_name_is_taken_once(desk: Desk, model: str) -> None:
    """The server sees what is saved, and the engine what is about to be."""
    first, second = save(desk, model), save(desk, model)
    third = save(desk, model, overwrite=True, user_metadata={"new": "yes"})
    samplers = [save_for_sampler(desk, model, "x") for _ in range(2)]
    desk.work()
    assert desk.result(first)
    assert error(desk, second) == (
        "user",
        f"there is a checkpoint tinker://{model}/weights/x already; choose another name, or overwrite it",
    )
    assert desk.result(third)
    assert desk.change(lambda db: db.get_one(Checkpoint, (model, "weights", "x")).user_metadata) == {"new": "yes"}
    assert (desk.row(samplers[0]).error, desk.row(samplers[1]).error_category) == (None, "user")


def test_a_checkpoint_that_cannot_get_its_name_is_none(desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if target.name == "x":
            raise OSError(28, "No space left on device")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        saved = save(desk, model)
        desk.work()
    assert error(desk, saved) == ("server", "OSError: [Errno 28] No space left on device")
    assert desk.change(lambda db: db.get(Checkpoint, (model, "weights", "x"))) is None
    assert not list(desk.config.checkpoints_base.glob("s_train_0/weights/*"))


def test_snapshots_are_what_the_model_was(desk: Desk, model: str) -> None:
    kept = save_for_sampler(desk, model, sampling_session_seq_id=3)
    desk.work()
    snapshot = json.loads(desk.result(kept))["sampling_session_id"]
    assert snapshot == "s:sample:3"
    before = desk.sample(sampling_session_id=snapshot, seq_id=1)
    desk.train(model)
    desk.step(model, 0.5)
    now = save_for_sampler(desk, model, sampling_session_seq_id=4)
    desk.work()
    again = desk.sample(sampling_session_id=snapshot, seq_id=2)
    later = desk.sample(sampling_session_id=json.loads(desk.result(now))["sampling_session_id"], seq_id=1)
    desk.work()
    assert desk.result(before) == desk.result(again)
    logprobs = [pb.SampleResponse.FromString(desk.result(one)).sequences[0].logprobs for one in (again, later)]
    assert logprobs[0] != logprobs[1]


def test_numbers_of_snapshots_are_given_once(desk: Desk, model: str) -> None:
    other = desk.model("s", 1)
    first = save_for_sampler(desk, model, sampling_session_seq_id=3)
    second = save_for_sampler(desk, other, sampling_session_seq_id=3)
    desk.work()
    assert desk.result(first)
    assert error(desk, second) == ("user", "sampling session s:sample:3 is there already; count up for each one")
    assert desk.change(lambda db: db.get_one(SamplingSession, "s:sample:3").model_id) == model


def test_external_weights(desk: Desk, model: str) -> None:
    asked = wire.SaveWeightsExternalRequest(model_id=model, path="out")
    saved = desk.submit(lambda to: submission.save_weights_external(to, asked))
    desk.work()
    answer = json.loads(desk.result(saved))
    folder = checkpoint_folder(desk.config, answer["path"])
    assert answer["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir()) > 0
    assert (folder / "adapter_model.safetensors").is_file()


def test_a_checkpoint_that_is_gone(desk: Desk, model: str) -> None:
    save(desk, model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    asked = wire.LoadWeightsRequest(path=path, optimizer=True, session_id="s", model_seq_id=1)
    loading = desk.submit(lambda to: submission.load_weights(to, asked))
    sampling = desk.sample(model_path=path)
    for file in checkpoint_folder(desk.config, path).iterdir():
        file.unlink()
    checkpoint_folder(desk.config, path).rmdir()
    desk.work()
    assert error(desk, loading) == ("user", f"there is no checkpoint {path}; it was deleted, or its time is over")
    assert error(desk, sampling) == ("user", f"there are no weights {path}; they were deleted")
    assert desk.change(lambda db: db.get_one(Model, "s:train:1").status) is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]


def test_loading_into_a_model_that_was_just_made(desk: Desk, model: str) -> None:
    save(desk, model)
    desk.work()
    into = desk.model("s", 1)
    asked = wire.LoadWeightsRequest(path=f"tinker://{model}/weights/x", optimizer=True, model_id=into, seq_id=1)
    desk.submit(lambda to: submission.load_weights(to, asked))
    desk.work()
    assert told(desk, into) == told(desk, model)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_model_that_was_just_made_outlives_what_cannot_be_loaded(desk: Desk, model: str, is_there: bool) -> None:
    save(desk, model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    folder = checkpoint_folder(desk.config, path)
    into, twin = desk.model("s", 1), desk.model("s", 2)
    for seq_id in (1, 2):
        asked = wire.LoadWeightsRequest(path=path, optimizer=True, model_id=into, seq_id=seq_id)
        loading = desk.submit(lambda to, asked=asked: submission.load_weights(to, asked))  # type: ignore[misc]
        if is_there:
            (folder / "training.json").write_text("{")
        else:
            folder.rename(folder.with_name("away"))
        desk.work()
        assert desk.row(loading).error is not None
        if not is_there:
            folder.with_name("away").rename(folder)
    assert desk.change(lambda db: db.get_one(Model, into).status) is ModelStatus.READY
    assert told(desk, into) == told(desk, twin)


def test_a_model_that_is_not_loaded_whole_is_not_there(desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(desk, model)
    desk.work()

    def full(model_id: str, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(desk.backend, "save_model", full)  # of the restore point
    other = load(desk, f"tinker://{model}/weights/x", 1)
    assert desk.change(lambda db: db.get_one(Model, other).status) is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]


def test_unloading_deletes(desk: Desk, model: str) -> None:
    unloaded = desk.submit(lambda to: submission.unload_model(to, wire.ModelRequest(model_id=model)))
    desk.work()
    assert json.loads(desk.result(unloaded)) == {"model_id": model, "type": "unload_model"}
    assert dict(desk.backend.models()) == {}
