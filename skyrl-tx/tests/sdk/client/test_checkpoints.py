import io
import tarfile
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from differences import RestClient, client_of, needs, takes
from passes import Server, distance, logprobs_of, step
from tinker import types

NewTraining = Callable[[], tinker.TrainingClient]


def test_resuming(server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """With its optimizer, a run resumes exactly from a checkpoint."""
    for _ in range(2):
        step(training, [server.data])
    path = training.save_state("two").result().path
    saved = logprobs_of(training, server.data)
    step(training, [server.data])
    expected = logprobs_of(training, server.data)
    whole = client_of(service.create_training_client_from_state_with_optimizer(path))
    assert distance(logprobs_of(whole, server.data), saved) == 0
    step(whole, [server.data])
    assert distance(logprobs_of(whole, server.data), expected) == 0


def test_all_parameters(server: Server, service: tinker.ServiceClient) -> None:
    """With rank 0, all parameters are trained, saved, resumed and sampled from."""
    training = client_of(service.create_lora_training_client(server.base_model, rank=0))
    step(training, [server.data])
    path = training.save_state("one").result().path
    step(training, [server.data])
    expected = logprobs_of(training, server.data)
    assert distance(expected, server.logprobs) > 0.1
    resumed = client_of(service.create_training_client_from_state_with_optimizer(path))
    step(resumed, [server.data])
    assert distance(logprobs_of(resumed, server.data), expected) == 0
    tokens = [*server.data[0].model_input.to_ints(), server.data[0].loss_fn_inputs["target_tokens"].tolist()[-1]]
    sampler = client_of(resumed.save_weights_and_get_sampling_client())
    found = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert distance([np.array(found[1:])], expected[:1]) < 1e-5


def test_loading_into_a_new_model(server: Server, training: tinker.TrainingClient, new_training: NewTraining) -> None:
    """`load_state` and `load_state_with_optimizer` load into a new model."""
    step(training, [server.data])
    path = training.save_state("one").result().path
    step(training, [server.data])
    found = []
    for name in ("load_state", "load_state_with_optimizer"):
        fresh = new_training()
        getattr(fresh, name)(path).result()
        step(fresh, [server.data])
        found.append(distance(logprobs_of(fresh, server.data), logprobs_of(training, server.data)))
    assert found[0] > 1e-3
    assert found[1] == 0


def test_names(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """A training and a sampler checkpoint may share a name; their paths differ."""
    paths = [training.save_state("0001").result().path, training.save_weights_for_sampler("0001").result().path]
    assert paths == [f"tinker://{training.model_id}/{kind}/0001" for kind in ("weights", "sampler_weights")]
    parsed = [types.ParsedCheckpointTinkerPath.from_tinker_path(path) for path in paths]
    assert [one.checkpoint_type for one in parsed] == ["training", "sampler"]


@takes(tinker.TrainingClient.save_state, "overwrite")
def test_overwriting(server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """A checkpoint is overwritten on request."""
    before = training.save_state("latest").result().path
    step(training, [server.data])
    assert training.save_state("latest", overwrite=True).result().path == before
    again = client_of(service.create_training_client_from_state(before))
    assert distance(logprobs_of(again, server.data), logprobs_of(training, server.data)) == 0


@takes(tinker.TrainingClient.save_state, "user_metadata")
def test_notes(training: tinker.TrainingClient, rest: Any) -> None:
    """A checkpoint is listed with its metadata."""
    training.save_state("noted", user_metadata={"loss": "0.5"}).result()
    (checkpoint,) = rest.list_checkpoints(training.model_id).result().checkpoints
    assert checkpoint.user_metadata == {"loss": "0.5"}


@needs(RestClient, "get_checkpoint_archive_url_from_tinker_path")
def test_archives(training: tinker.TrainingClient, rest: Any) -> None:
    """A checkpoint is downloaded as an archive."""
    path = training.save_weights_for_sampler("packed").result().path
    url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    with urllib.request.urlopen(url, timeout=30) as reply, tarfile.open(fileobj=io.BytesIO(reply.read())) as archive:
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(archive.getnames())


@needs(RestClient, "get_external_weights_urls")
def test_external_weights(training: tinker.TrainingClient, rest: Any) -> None:
    """Weights for other programs are downloaded file by file."""
    path = training.save_weights_external("outside").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= urls.keys()
    with urllib.request.urlopen(urls["adapter_config.json"], timeout=30) as reply:
        assert b'"r": 4' in reply.read()
