"""The real client, from its first call to its last, against a real server; a thread of the test plays the engine."""

from __future__ import annotations

import itertools
import re
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tx_server import BASE_MODEL, Running, serving

from tx.tinker.db_models import Kind, Model, SessionStatus
from tx.tinker.db_models import Session as ClientSession
from tx.tinker.wire import codec
from tx.tinker.wire.requests import CreateModelRequest, OptimStepRequest
from tx.tinker.wire.sample_job import SampleJob

ADAM = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
PROMPT = types.ModelInput.from_ints([5, 6, 7])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("state")) as running:
        yield running


@pytest.fixture
def service(server: Running) -> Iterator[tinker.ServiceClient]:
    client = server.sdk(user_metadata={"run": "test"})
    yield client
    client.close(status="success")


@pytest.fixture
def rest(server: Running) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key="tml-test")  # pragma: allowlist secret


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=4, user_metadata={"renderer_name": "plain"}).result()


def datum(n_tokens: int = 3, **inputs: Any) -> types.Datum:
    tokens = list(range(1, n_tokens + 1))
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": np.array(tokens), **inputs}
    )


def weighted() -> types.Datum:
    return datum(weights=np.array([0, 1, -2.5], np.float32))


def test_training_and_sampling(server: Running, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    assert re.fullmatch(r"[0-9a-f-]{36}:train:0", training.model_id)
    info = training.get_info()
    assert (info.model_data.model_name, info.model_data.tokenizer_id) == (BASE_MODEL, "org/tokenizer")
    assert (info.is_lora, info.lora_rank) == (True, 4)
    output = training.forward_backward([weighted(), weighted()], "cross_entropy").result()
    assert output.metrics == {"loss:sum": 12.0}
    assert output.loss_fn_outputs[1]["logprobs"].tolist() == [-1, -2, -3]
    assert output.loss_fn_outputs[1]["elementwise_loss"].tolist() == [1, 2, 3]
    assert training.optim_step(ADAM).result().metrics == {"skyrl.ai/grad_norm": 1.0}
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=3, seed=1, stop=["x"])
    sampled = sampler.sample(PROMPT, num_samples=2, sampling_params=params, include_prompt_logprobs=True).result()
    assert [sequence.tokens for sequence in sampled.sequences] == [[0, 0, 0], [1, 1, 1]]
    assert len({sequence.sequence_id for sequence in sampled.sequences}) == 2
    assert sampled.prompt_logprobs == [None, -1, -1]
    assert sampler.compute_logprobs(PROMPT).result() == [None, -1, -1]


def test_what_the_engine_is_told(server: Running, training: tinker.TrainingClient) -> None:
    training.optim_step(ADAM).result()
    created = CreateModelRequest.model_validate_json(server.rows(Kind.CREATE_MODEL)[-1].payload)
    assert created.model_id == training.model_id
    assert created.lora_config is not None
    assert created.lora_config.seed is not None
    step = OptimStepRequest.model_validate_json(server.rows(Kind.OPTIM_STEP)[-1].payload).adam()
    assert (step.learning_rate, step.beta2, step.eps, step.grad_clip_norm) == (1e-3, 0.95, 1e-12, 1.0)


def test_forward_only_is_told(server: Running, training: tinker.TrainingClient) -> None:
    training.forward([weighted()], "cross_entropy").result()
    training.forward_backward([weighted()], "cross_entropy").result()
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert [codec.message_from_bytes(one.payload).forward_only for one in passes] == [True, False]


def test_custom_losses(server: Running, training: tinker.TrainingClient) -> None:
    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return -sum(one.sum() * 3 for one in logprobs), {"mine:mean": 4.0}  # type: ignore[return-value]

    output = training.forward_backward_custom([datum(), datum(5)], loss).result()
    assert output.metrics["loss:sum"] == 3 * (6 + 15)
    assert output.metrics["mine:mean"] == 4.0


def test_losses_of_reinforcement_learning(training: tinker.TrainingClient) -> None:
    policy = {"logprobs": np.float32([-1, -1, 0]), "advantages": np.float32([1, -1, 0])}
    for name in ("importance_sampling", "ppo", "cispo", "dro"):
        assert training.forward_backward([datum(**policy)], name).result().metrics  # type: ignore[arg-type]
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    training.forward_backward([datum(**policy)], "ppo", config).result()  # type: ignore[arg-type]


def test_many_chunks_arrive_once_each(server: Running, training: tinker.TrainingClient) -> None:
    output = training.forward_backward([weighted()] * 2500, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 2500
    assert output.metrics["loss:sum"] == 2500 * 6
    passes = [one for one in server.rows(Kind.FORWARD_BACKWARD) if one.model_id == training.model_id]
    assert sorted(one.seq_id for one in passes if one.seq_id) == [1, 2, 3]


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


def test_sampling_from_names(service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    path = training.save_weights_for_sampler("sampled").result().path
    params = types.SamplingParams(max_tokens=2)
    for options in ({"model_path": path}, {"base_model": BASE_MODEL}):
        sampler = service.create_sampling_client(**options).result()
        assert sampler.sample(PROMPT, 1, params).result().sequences[0].tokens == [0, 0]
        assert sampler.get_base_model() == BASE_MODEL


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


@pytest.mark.filterwarnings("ignore:RestClient.search_sessions")
def test_sessions(
    server: Running, rest: tinker.RestClient, service: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    session_id = training.model_id.partition(":")[0]
    assert session_id == rest.list_sessions(limit=1).result().sessions[0]
    found = rest.get_session(session_id).result()
    assert found.training_run_ids == [training.model_id]
    assert found.user_metadata == {"run": "test"}
    rest.assign_session_project(session_id, "project").result()
    page = rest.search_sessions(types.SessionSearchRequest(session_id=session_id, project_ids=["project"])).result()
    assert [one.session_id for one in page.sessions] == [session_id]
    models = rest.get_server_capabilities().result().supported_models
    assert [(one.model_name, one.max_context_length) for one in models] == [(BASE_MODEL, 64)]


def test_finishing_unloads(server: Running) -> None:
    client = server.sdk()
    training = client.create_lora_training_client(BASE_MODEL, rank=4).result()
    client.close(status="errored", detail="by test")
    deadline = time.monotonic() + 10
    unloaded: list[str] = []
    while training.model_id not in unloaded and time.monotonic() < deadline:
        time.sleep(0.02)
        unloaded = [str(one.model_id) for one in server.rows(Kind.UNLOAD_MODEL)]
    assert unloaded.count(training.model_id) == 1

    def check(db: Any) -> None:
        session = db.get(ClientSession, training.model_id.partition(":")[0])
        assert (session.status, session.end_reason) == (SessionStatus.FINISHED, "errored: by test")
        assert db.get(Model, training.model_id) is not None

    server.change(check)
    with server.client() as http:
        late = http.post("optim_step", json={"model_id": training.model_id, "seq_id": 1, "adam_params": {}})
    assert late.status_code == 400
    assert "is finished; begin a new one" in late.text


def test_what_an_engine_fails_at_is_raised_at_once(server: Running, training: tinker.TrainingClient) -> None:
    try:
        for category in ("user", "server"):
            server.fails_with = (f"a fault of the {category}", category)
            with pytest.raises(tinker.RequestFailedError, match=f"a fault of the {category}") as raised:
                training.optim_step(ADAM).result()
            assert raised.value.category == category
    finally:
        server.fails_with = None


def test_polls_are_held(server: Running, training: tinker.TrainingClient, caplog: pytest.LogCaptureFixture) -> None:
    server.is_engine_paused = True
    step = training.optim_step(ADAM)
    time.sleep(1)
    server.is_engine_paused = False
    assert step.result(timeout=5).metrics
    assert not [record for record in caplog.records if "paused" in record.message.lower()]


def test_fifty_samples_at_once(service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    asked = [sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=2)) for _ in range(50)]
    found = [one.result() for one in asked]
    ids = list(itertools.chain.from_iterable([s.sequence_id for s in one.sequences] for one in found))
    assert len(set(ids)) == 100


CE = "cross_entropy"


def superfluous() -> types.Datum:
    return datum(advantages=np.ones(3))


MISTAKES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "name": (lambda s, t: s.create_lora_training_client("other/model", rank=4).result(), "'other/model' is not served"),
    "rank": (lambda s, t: s.create_lora_training_client(BASE_MODEL, rank=999).result(), "rank=999 is more than"),
    "loss": (lambda s, t: t.forward_backward([datum()], "stable_reinforce").result(), "loss_fn='stable_reinforce'"),
    "setting": (lambda s, t: t.forward_backward([datum()], "cross_entropy", {"beta": 1.0}).result(), "'beta'"),
    "lacks": (lambda s, t: t.forward_backward([datum()], "ppo").result(), "lacks 'logprobs'"),
    "superfluous": (
        lambda s, t: t.forward_backward([superfluous()], "cross_entropy").result(),
        "'advantages'",
    ),
    "length": (lambda s, t: t.forward_backward([datum(weights=np.ones(2))], CE).result(), r"shape \[2\]"),
    "too long": (
        lambda s, t: t.forward_backward([datum(65)], CE).result(),
        "65 tokens, and the model takes 64",
    ),
    "nan": (
        lambda s, t: t.forward_backward([datum(weights=np.float32([1, np.nan, 1]))], CE).result(),
        "is nan",
    ),
    "image": (
        lambda s, t: t.forward_backward(
            [
                types.Datum(
                    model_input=types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]),
                    loss_fn_inputs={"target_tokens": np.array([1])},
                )
            ],
            "cross_entropy",
        ).result(),
        "chunk of kind image",
    ),
    "dimuon": (lambda s, t: t.optim_step(types.DimuonParams(learning_rate=0.1)).result(), "'dimuon' is not supported"),
    "traversal": (lambda s, t: t.save_state("../../etc/passwd").result(), "cannot name a checkpoint"),
    "gone": (
        lambda s, t: s.create_training_client_from_state(f"tinker://{t.model_id}/weights/gone").result(),
        "there is no checkpoint",
    ),
    "no path": (lambda s, t: s.create_sampling_client(model_path="tinker://x/y").result(), "is no path"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_raised_at_once(name: str, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    mistake, words = MISTAKES[name]
    started = time.monotonic()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=words):
        mistake(service, training)
    assert time.monotonic() - started < 2


SAMPLE_MISTAKES: dict[str, tuple[types.ModelInput, dict[str, Any], dict[str, Any], str]] = {
    "token": (types.ModelInput.from_ints([100]), {}, {}, "prompt holds token 100"),
    "empty": (types.ModelInput.from_ints([]), {}, {}, "prompt is empty"),
    "long": (types.ModelInput.from_ints([1] * 64), {"max_tokens": 2}, {}, "the most for this prompt is 1"),
    "stop": (PROMPT, {"stop": ["x" * 99]}, {}, "99 characters"),
    "top": (PROMPT, {}, {"topk_prompt_logprobs": 2000}, "topk_prompt_logprobs=2000"),
    "last": (PROMPT, {}, {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
}


@pytest.mark.parametrize("name", SAMPLE_MISTAKES)
def test_mistakes_in_sampling_are_raised_at_once(name: str, service: tinker.ServiceClient) -> None:
    prompt, params, options, words = SAMPLE_MISTAKES[name]
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    started = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match=words):
        sampler.sample(prompt, 1, types.SamplingParams(**{"max_tokens": 1, **params}), **options).result()
    assert time.monotonic() - started < 2


def test_stops(server: Running, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()

    def job(stop: Any) -> SampleJob:
        sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1, stop=stop)).result()
        return SampleJob.model_validate_json(server.rows(Kind.SAMPLE)[-1].payload)

    assert (job(None).stop_tokens, job(None).stop_strings) == (None, [])
    assert (job([]).stop_tokens, job([]).stop_strings) == ([], [])
    assert (job([7]).stop_tokens, job([7]).stop_strings) == ([7], [])
    assert (job("x").stop_tokens, job("x").stop_strings) == (None, ["x"])
    asked = job(None).request(eos_ids=[2], max_context=64)
    assert asked.params.stop_tokens == (2,)


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
