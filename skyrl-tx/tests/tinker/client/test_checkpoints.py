"""Checkpoints with the real client: written, listed, loaded, copied and downloaded."""

from __future__ import annotations

import tarfile
import urllib.request
from pathlib import Path

import pytest
import tinker
from tinker import types
from tx_client import PROMPT, weighted
from tx_server import BASE_MODEL, Running


def test_checkpoints(
    server: Running, rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_state("0001", ttl_seconds=7200).result().path
    assert path == f"tinker://{training.model_id}/weights/0001"
    sampler_path = training.save_weights_for_sampler("0001").result().path
    assert sampler_path == f"tinker://{training.model_id}/sampler_weights/0001"
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [one.checkpoint_id for one in found] == ["sampler_weights/0001", "weights/0001"]
    assert found[1].expires_at is not None
    assert 7000 < (found[1].expires_at - found[1].time).total_seconds() < 7300
    run = rest.get_training_run(training.model_id).result()
    assert (run.user_metadata, run.lora_rank, run.base_model) == ({"renderer_name": "plain"}, 4, BASE_MODEL)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == path
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (public,) = [one for one in rest.list_checkpoints(training.model_id).result().checkpoints if one.public]
    assert public.expires_at is None
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == (BASE_MODEL, True, 4, True)
    folder = server.config.checkpoints_base / training.model_id.replace(":", "_") / "weights" / "0001"
    assert folder.is_dir()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert not folder.exists()
    assert [one.tinker_path for one in rest.list_user_checkpoints(limit=1).result().checkpoints] == [sampler_path]


def test_going_on_from_a_checkpoint(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    path = training.save_state("there").result().path
    for create in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        again = create(path).result()
        assert again.model_id != training.model_id
        assert again.get_info().lora_rank == 4
        again.forward_backward([weighted()], "cross_entropy").result()


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # what older programs still call
def test_a_checkpoint_is_loaded_first_or_never(training: tinker.TrainingClient, service: tinker.ServiceClient) -> None:
    path = training.save_state("first").result().path
    with pytest.raises(tinker.BadRequestError, match="LoadWeights is not permitted"):
        training.load_state(path).result()
    fresh = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    assert fresh.load_state(path).result().path == path
    other = service.create_lora_training_client(BASE_MODEL, rank=8).result()
    with pytest.raises(tinker.BadRequestError, match="has rank 4"):
        other.load_state(path).result()


def test_external_weights(
    tmp_path: Path, rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_external("out").result().path
    found = rest.get_external_weights_urls(path).result()
    assert sorted(found.urls) == ["adapter_config.json", "more/weights.bin"]
    assert found.expires.tzinfo is not None
    for name, url in found.urls.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        urllib.request.urlretrieve(url, tmp_path / name)
    assert (tmp_path / "more/weights.bin").read_bytes() == bytes(range(256)) * 10


def test_copies(
    server: Running, rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = training.save_weights_for_sampler("copied").result().path
    copy = rest.copy_weights(path, "archive", ttl_seconds=7200).result()
    assert copy.endswith(":train:0/sampler_weights/copied")
    assert copy != path
    rest.delete_checkpoint_from_tinker_path(path).result()
    sampler = service.create_sampling_client(model_path=copy).result()
    assert sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result().sequences
    run = copy.removeprefix("tinker://").partition("/")[0]
    assert run in [one.training_run_id for one in rest.list_training_runs(project_id="archive").result().training_runs]


def test_archive_of_older_clients(tmp_path: Path, server: Running, training: tinker.TrainingClient) -> None:
    training.save_weights_for_sampler("archived").result()
    with server.client() as http:
        found = http.get(f"training_runs/{training.model_id}/checkpoints/sampler_weights/archived/archive")
        assert found.status_code == 302
        assert found.headers["expires"].endswith("GMT")
        (tmp_path / "archive.tar").write_bytes(http.get(found.headers["location"]).content)
    with tarfile.open(tmp_path / "archive.tar") as archive:
        assert archive.getnames() == ["adapter_config.json", "more/weights.bin"]
        weights = archive.extractfile("more/weights.bin")
        assert weights is not None
        assert weights.read() == bytes(range(256)) * 10


def test_external_weights_are_hidden_from_older_clients(server: Running, training: tinker.TrainingClient) -> None:
    training.save_state("one").result()
    training.save_weights_external("out").result()
    for version, kinds in {"0.24.1": {"training"}, "0.38.0": {"external", "training"}}.items():
        with server.client(**{"X-Stainless-Package-Version": version}) as http:
            of_run = http.get(f"training_runs/{training.model_id}/checkpoints").json()
            of_user = http.get("checkpoints", params={"limit": 1000}).json()
        assert {one["checkpoint_type"] for one in of_run["checkpoints"]} == kinds
        assert ("external" in {one["checkpoint_type"] for one in of_user["checkpoints"]}) == ("external" in kinds)
        assert of_user["cursor"]["total_count"] == len(of_user["checkpoints"])
