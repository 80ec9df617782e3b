from typing import Any

import pytest
import tinker
from differences import KEY, RestClient, client_of, close, needs
from passes import Server, distance, logprobs_of, step


def test_runs(server: Server, service: tinker.ServiceClient, rest: Any) -> None:
    """Runs are listed with their rank and metadata."""
    metadata = {"renderer_name": "plain"}
    training = client_of(service.create_lora_training_client(server.base_model, rank=2, user_metadata=metadata))
    run = rest.get_training_run(training.model_id).result()
    assert (run.base_model, run.lora_rank, run.user_metadata) == (server.base_model, 2, metadata)
    listed = rest.list_training_runs(limit=1000).result().training_runs
    assert training.model_id in [one.training_run_id for one in listed]


def test_checkpoints(service: tinker.ServiceClient, training: tinker.TrainingClient, rest: Any) -> None:
    """Checkpoints are listed, published, given a lifetime, and deleted."""
    path = training.save_state("0001", ttl_seconds=7200).result().path
    sampled = training.save_weights_for_sampler("0001").result().path
    found = rest.list_checkpoints(training.model_id).result().checkpoints
    assert {one.checkpoint_id for one in found} == {"sampler_weights/0001", "weights/0001"}
    assert path in [one.tinker_path for one in rest.list_user_checkpoints(limit=1000).result().checkpoints]
    assert [one.expires_at is None for one in found if one.tinker_path == path] == [False]
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    (public,) = [one for one in rest.list_checkpoints(training.model_id).result().checkpoints if one.public]
    assert (public.tinker_path, public.expires_at) == (path, None)
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.is_lora, info.lora_rank) == (True, 4)
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [one.tinker_path for one in left] == [sampled]
    with pytest.raises(tinker.APIError, match="there is no checkpoint"):
        client_of(service.create_training_client_from_state(path))


def test_sessions(training: tinker.TrainingClient, rest: Any) -> None:
    """Sessions are listed, with the runs of each."""
    session = training.model_id.partition(":")[0]
    assert session in rest.list_sessions(limit=1000).result().sessions
    assert training.model_id in rest.get_session(session).result().training_run_ids


@needs(RestClient, "assign_session_project")
def test_projects(training: tinker.TrainingClient, rest: Any) -> None:
    """A session is assigned to a project, by which its runs are found."""
    session = training.model_id.partition(":")[0]
    rest.assign_session_project(session, f"project-{session}").result()
    runs = rest.list_training_runs(limit=1000, project_id=f"project-{session}").result().training_runs
    assert training.model_id in [one.training_run_id for one in runs]


@needs(tinker.ServiceClient, "copy_weights")
def test_copies(server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient, rest: Any) -> None:
    """A copy of weights outlives the original."""
    step(training, [server.data])
    copied = logprobs_of(training, server.data)
    path = training.save_state("copied").result().path
    project = tinker.ServiceClient(base_url=server.url, api_key=KEY, project_id="archive")
    copy = project.copy_weights(path).result()
    close(project)
    rest.delete_checkpoint_from_tinker_path(path).result()
    again = client_of(service.create_training_client_from_state(copy))
    assert distance(logprobs_of(again, server.data), copied) == 0
    assert distance(copied, server.logprobs) > 0.1


def test_capabilities(server: Server, service: tinker.ServiceClient) -> None:
    """The server lists the model it serves."""
    (model,) = service.get_server_capabilities().supported_models
    assert model.model_name == server.base_model


@needs(tinker.ServiceClient, "close")
def test_closing(server: Server) -> None:
    """A closed client starts no new requests."""
    closing = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    client_of(closing.create_lora_training_client(server.base_model, rank=2))
    closing.close("success").result()
    with pytest.raises(RuntimeError, match="closed"):
        client_of(closing.create_lora_training_client(server.base_model, rank=2))
