"""Checkpoint requests of older programs and clients."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import tinker
from tx_kit.servers import BASE_MODEL, Running


@pytest.mark.filterwarnings("ignore:DEPRECATED")  # still used by older programs
def test_a_checkpoint_is_loaded_before_other_requests(
    training: tinker.TrainingClient, service: tinker.ServiceClient
) -> None:
    path = training.save_state("first").result().path
    with pytest.raises(tinker.BadRequestError, match="LoadWeights is not permitted"):
        training.load_state(path).result()
    fresh = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    assert fresh.load_state(path).result().path == path
    other = service.create_lora_training_client(BASE_MODEL, rank=8).result()
    with pytest.raises(tinker.BadRequestError, match="has rank 4"):
        other.load_state(path).result()


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
