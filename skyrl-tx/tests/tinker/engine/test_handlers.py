"""All requests of a model except passes."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tx_kit.engines import Desk

from tx.tinker.db_models import Checkpoint, Model, ModelStatus, SamplingSession
from tx.tinker.store.checkpoint_files import checkpoint_folder
from tx.tinker.submission import training as submission
from tx.tinker.wire import requests as wire
from tx.tinker.wire import tinker_pb2 as pb


@pytest.fixture
def model(desk: Desk) -> str:
    """A model after a few steps."""
    name = desk.model(desk.session())
    desk.train(name)
    desk.step(name)
    desk.work()
    return name


def save(desk: Desk, model: str, path: str | None = "x", **fields: Any) -> int:
    body = wire.SaveWeightsRequest(model_id=model, path=path, **fields)
    return desk.submit(lambda to: submission.save_weights(to, body))


def save_for_sampler(desk: Desk, model: str, path: str | None = None, **fields: Any) -> int:
    body = wire.SaveWeightsForSamplerRequest(model_id=model, path=path, **fields)
    return desk.submit(lambda to: submission.save_weights_for_sampler(to, body))


def load(desk: Desk, path: str, number: int, *, optimizer: bool = False) -> str:
    body = wire.LoadWeightsRequest(path=path, optimizer=optimizer, session_id="s", model_seq_id=number)
    desk.submit(lambda to: submission.load_weights(to, body))
    desk.work()
    return f"s:train:{number}"


def error(desk: Desk, request_id: int) -> tuple[str | None, str | None]:
    row = desk.row(request_id)
    return row.error_category, row.error


def probe(desk: Desk, model: str) -> float:
    request_id = desk.train(model, [7, 8, 9], is_forward_only=True)
    desk.work()
    return desk.loss(request_id)


def test_a_step_with_an_infinite_gradient_fails(desk: Desk, model: str) -> None:
    before = probe(desk, model)
    desk.train(model, weight=3e38)
    failed = desk.step(model)
    desk.work()
    category, message = error(desk, failed)
    assert category == "user"
    assert re.match(r"the step was not applied, because the norm of the gradients is (inf|nan)\. ", message or "")
    assert probe(desk, model) == before
    desk.train(model)
    applied = desk.step(model)
    desk.work()
    assert 0 < json.loads(desk.result(applied))["metrics"]["skyrl.ai/grad_norm"] < math.inf


def test_chosen_seeds_are_kept(desk: Desk) -> None:
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
    assert probe(desk, load(desk, path, 1)) == probe(desk, model)


def test_a_name_is_taken_once(desk: Desk, model: str) -> None:
    """The server knows saved checkpoints, and the engine those that are about to be saved."""
    first, second = save(desk, model), save(desk, model)
    third = save(desk, model, overwrite=True, user_metadata={"new": "yes"})
    samplers = [save_for_sampler(desk, model, "x") for _ in range(2)]
    desk.work()
    assert desk.result(first)
    assert error(desk, second) == (
        "user",
        f"checkpoint tinker://{model}/weights/x already exists; choose another name, or overwrite it",
    )
    assert desk.result(third)
    assert desk.change(lambda db: db.get_one(Checkpoint, (model, "weights", "x")).user_metadata) == {"new": "yes"}
    assert (desk.row(samplers[0]).error, desk.row(samplers[1]).error_category) == (None, "user")


def test_a_checkpoint_that_cannot_be_renamed_is_discarded(
    desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_snapshots_are_immutable(desk: Desk, model: str) -> None:
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


def test_snapshot_numbers_are_unique(desk: Desk, model: str) -> None:
    other = desk.model("s", 1)
    first = save_for_sampler(desk, model, sampling_session_seq_id=3)
    second = save_for_sampler(desk, other, sampling_session_seq_id=3)
    desk.work()
    assert desk.result(first)
    assert error(desk, second) == (
        "user",
        "sampling session s:sample:3 already exists; increment its number for each new one",
    )
    assert desk.change(lambda db: db.get_one(SamplingSession, "s:sample:3").model_id) == model


def test_external_weights(desk: Desk, model: str) -> None:
    body = wire.SaveWeightsExternalRequest(model_id=model, path="out")
    saved = desk.submit(lambda to: submission.save_weights_external(to, body))
    desk.work()
    answer = json.loads(desk.result(saved))
    folder = checkpoint_folder(desk.config, answer["path"])
    assert answer["size_bytes"] == sum(file.stat().st_size for file in folder.iterdir()) > 0
    assert (folder / "adapter_model.safetensors").is_file()


def test_a_deleted_checkpoint(desk: Desk, model: str) -> None:
    save(desk, model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    body = wire.LoadWeightsRequest(path=path, optimizer=True, session_id="s", model_seq_id=1)
    loading = desk.submit(lambda to: submission.load_weights(to, body))
    sampling = desk.sample(model_path=path)
    for file in checkpoint_folder(desk.config, path).iterdir():
        file.unlink()
    checkpoint_folder(desk.config, path).rmdir()
    desk.work()
    assert error(desk, loading) == ("user", f"there is no checkpoint {path}; it was deleted or has expired")
    assert error(desk, sampling) == ("user", f"there are no weights {path}; they were deleted")
    assert desk.change(lambda db: db.get_one(Model, "s:train:1").status) is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]


def test_loading_into_a_new_model(desk: Desk, model: str) -> None:
    save(desk, model)
    desk.work()
    into = desk.model("s", 1)
    body = wire.LoadWeightsRequest(path=f"tinker://{model}/weights/x", optimizer=True, model_id=into, seq_id=1)
    desk.submit(lambda to: submission.load_weights(to, body))
    desk.work()
    assert probe(desk, into) == probe(desk, model)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_model_survives_a_failed_load(desk: Desk, model: str, is_there: bool) -> None:
    save(desk, model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    folder = checkpoint_folder(desk.config, path)
    into, twin = desk.model("s", 1), desk.model("s", 2)
    for seq_id in (1, 2):
        body = wire.LoadWeightsRequest(path=path, optimizer=True, model_id=into, seq_id=seq_id)
        loading = desk.submit(lambda to, body=body: submission.load_weights(to, body))  # type: ignore[misc]
        if is_there:
            (folder / "training.json").write_text("{")
        else:
            folder.rename(folder.with_name("away"))
        desk.work()
        assert desk.row(loading).error is not None
        if not is_there:
            folder.with_name("away").rename(folder)
    assert desk.change(lambda db: db.get_one(Model, into).status) is ModelStatus.READY
    assert probe(desk, into) == probe(desk, twin)


def test_a_partially_loaded_model_is_discarded(desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(desk, model)
    desk.work()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(desk.backend, "freeze", lambda model_id, *, with_optimizer: full)  # of the restore point
    other = load(desk, f"tinker://{model}/weights/x", 1)
    assert desk.change(lambda db: db.get_one(Model, other).status) is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]


def test_unloading_deletes(desk: Desk, model: str) -> None:
    unloaded = desk.submit(lambda to: submission.unload_model(to, wire.ModelRequest(model_id=model)))
    desk.work()
    assert json.loads(desk.result(unloaded)) == {"model_id": model, "type": "unload_model"}
    assert dict(desk.backend.models()) == {}
