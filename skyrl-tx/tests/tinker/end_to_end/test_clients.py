from collections.abc import Iterator

import pytest
import tinker
from tinker import types
from tx_kit.servers import BASE_MODEL, Running

from tx.tinker.db_models import Kind
from tx.tinker.wire.requests import CreateModelRequest, OptimStepRequest
from tx.tinker.wire.sample_job import SampleJob

ADAM = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture
def service(server: Running) -> Iterator[tinker.ServiceClient]:
    client = server.sdk(user_metadata={"run": "test"})
    yield client
    client.close(status="success")


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"renderer_name": "plain"}).result()


def test_the_engine_gets_the_users_settings(server: Running, training: tinker.TrainingClient) -> None:
    training.optim_step(ADAM).result()
    created = CreateModelRequest.model_validate_json(server.rows(Kind.CREATE_MODEL)[-1].payload)
    assert created.model_id == training.model_id
    assert created.lora_config is not None
    assert created.lora_config.seed is not None
    step = OptimStepRequest.model_validate_json(server.rows(Kind.OPTIM_STEP)[-1].payload).adam()
    assert (step.learning_rate, step.beta2, step.eps, step.grad_clip_norm) == (1e-3, 0.95, 1e-12, 1.0)


def last_job(server: Running) -> SampleJob:
    """Return what the engine got for the last sample."""
    return SampleJob.model_validate_json(server.rows(Kind.SAMPLE)[-1].payload)


def test_stops(server: Running, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    for stop, tokens, strings in ((None, None, []), ([], [], []), ([7], [7], []), ("x", None, ["x"])):
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
        assert (last_job(server).stop_tokens, last_job(server).stop_strings) == (tokens, strings)
    job = last_job(server).model_copy(update={"stop_strings": []})
    request = job.request([5, 6, 7], [], owner="", eos_ids=[2], max_context=64)
    assert request.params.stop_tokens == (2,)


def test_a_checkpoint_may_be_given_with_its_base_model(
    server: Running, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    """Recipes name both for a teacher; other base models are refused."""
    path = training.save_state("teacher").result().path
    sampler = service.create_sampling_client(model_path=path, base_model=BASE_MODEL).result()
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()
    assert last_job(server).weights.model_path == path
    with pytest.raises(tinker.BadRequestError, match="'other/model' is not served here"):
        service.create_sampling_client(model_path=path, base_model="other/model").result()


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


def test_external_weights_are_hidden_from_older_clients(server: Running, training: tinker.TrainingClient) -> None:
    training.save_state("one").result()
    training.save_weights_external("out").result()
    older, newer = {"training"}, {"external", "training"}
    for version, kinds in {"0.9": older, "0.27.2": older, "0.28.0": newer, "1": newer, "0.x": newer}.items():
        with server.client(**{"X-Stainless-Package-Version": version}) as http:
            of_run = http.get(f"training_runs/{training.model_id}/checkpoints").json()
            of_user = http.get("checkpoints", params={"limit": 1000}).json()
        assert {one["checkpoint_type"] for one in of_run["checkpoints"]} == kinds
        assert ("external" in {one["checkpoint_type"] for one in of_user["checkpoints"]}) == ("external" in kinds)
        assert of_user["cursor"]["total_count"] == len(of_user["checkpoints"])
