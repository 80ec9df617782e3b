import json
import shutil
from pathlib import Path

import pytest
from tx_kit.engines import Desk

from tx.tinker.db_models import Checkpoint, ModelStatus, SamplingSession
from tx.tinker.store.checkpoint_files import checkpoint_folder
from tx.tinker.submission import training as submission
from tx.tinker.wire import requests as wire


def load(desk: Desk, path: str) -> str:
    """Load the weights of a checkpoint as a second model."""
    desk.load(path, model_seq_id=1, optimizer=False)
    desk.work()
    return "s:train:1"


def test_chosen_seeds_are_kept(desk: Desk) -> None:
    session = desk.session()
    for number, seed in enumerate((None, None, -5, 2**64 - 1)):
        desk.model(session, number, seed=seed)
    desk.work()
    assert len({desk.backend.models()[f"s:train:{number}"].seed for number in range(4)}) == 4
    assert all(desk.model_row(f"s:train:{number}").status == "ready" for number in range(4))


def test_a_checkpoint(desk: Desk, model: str) -> None:
    saved = desk.save(model, ttl_seconds=3600, user_metadata={"a": "b"})
    desk.work()
    path = f"tinker://{model}/weights/x"
    assert json.loads(desk.result(saved))["path"] == path
    row = desk.change(lambda db: db.get_one(Checkpoint, (model, "weights", "x")))
    assert row.expires_at is not None
    assert (row.expires_at - row.created_at).total_seconds() == pytest.approx(3600, abs=5)
    files = list(checkpoint_folder(desk.config, path).iterdir())
    assert (row.size_bytes, row.user_metadata) == (sum(file.stat().st_size for file in files), {"a": "b"})
    assert desk.current_loss(load(desk, path)) == desk.current_loss(model)


def test_a_name_is_taken_once(desk: Desk, model: str) -> None:
    """The server knows saved checkpoints, and the engine those that are about to be saved."""
    first, second = desk.save(model), desk.save(model)
    third = desk.save(model, overwrite=True, user_metadata={"new": "yes"})
    samplers = [desk.save_for_sampler(model, "x") for _ in range(2)]
    desk.work()
    assert desk.result(first)
    words = f"checkpoint tinker://{model}/weights/x already exists; choose another name, or overwrite it"
    assert desk.error(second) == ("user", words)
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
        saved = desk.save(model)
        desk.work()
    assert desk.error(saved) == ("server", "OSError: [Errno 28] No space left on device")
    assert desk.change(lambda db: db.get(Checkpoint, (model, "weights", "x"))) is None
    assert not list(desk.config.checkpoints_base.glob("s_train_0/weights/*"))


def test_snapshot_numbers_are_unique(desk: Desk, model: str) -> None:
    other = desk.model("s", 1)
    first = desk.save_for_sampler(model, sampling_session_seq_id=3)
    second = desk.save_for_sampler(other, sampling_session_seq_id=3)
    desk.work()
    assert desk.result(first)
    words = "sampling session s:sample:3 already exists; increment its number for each new one"
    assert desk.error(second) == ("user", words)
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
    desk.save(model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    loading = desk.load(path, model_seq_id=1)
    sampling = desk.sample(model_path=path)
    shutil.rmtree(checkpoint_folder(desk.config, path))
    desk.work()
    assert desk.error(loading) == ("user", f"there is no checkpoint {path}; it was deleted or has expired")
    assert desk.error(sampling) == ("user", f"there are no weights {path}; they were deleted")
    assert desk.model_row("s:train:1").status is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_model_survives_a_failed_load(desk: Desk, model: str, is_there: bool) -> None:
    desk.save(model)
    desk.work()
    path = f"tinker://{model}/weights/x"
    folder = checkpoint_folder(desk.config, path)
    into, twin = desk.model("s", 1), desk.model("s", 2)
    for seq_id in (1, 2):
        loading = desk.load(path, model_id=into, seq_id=seq_id)
        if is_there:
            (folder / "training.json").write_text("{")
        else:
            folder.rename(folder.with_name("away"))
        desk.work()
        assert desk.row(loading).error is not None
        if not is_there:
            folder.with_name("away").rename(folder)
    assert desk.model_row(into).status is ModelStatus.READY
    assert desk.current_loss(into) == desk.current_loss(twin)


def test_a_partially_loaded_model_is_discarded(desk: Desk, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.save(model)
    desk.work()

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(desk.backend, "capture", lambda model_id, *, with_optimizer: full)  # of the restore point
    other = load(desk, f"tinker://{model}/weights/x")
    assert desk.model_row(other).status is ModelStatus.FAILED
    assert list(desk.backend.models()) == [model]
