"""Images from the SDK, through a server and an engine with a vision-language model."""

import base64
import io
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from train_kit.vision_models import picture, save_vision_model
from tx_kit.engines import engine_for
from tx_kit.servers import BASE_MODEL, Running, assert_refused, result_of, serving

from tx.tinker.backends.factory import new_backend
from tx.tinker.backends.images import count_pixels
from tx.tinker.db_models import Kind
from tx.tinker.types import ImageInput
from tx.tinker.wire import tinker_pb2 as pb

GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0)


def content(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed, 60, 40).save(file, "PNG")
    return file.getvalue()


IMAGE = types.ImageChunk(data=content(0), format="png", expected_tokens=4)


def model_input(*parts: list[int] | types.ImageChunk) -> types.ModelInput:
    chunks = [types.EncodedTextChunk(tokens=part) if isinstance(part, list) else part for part in parts]
    return types.ModelInput(chunks=chunks)


PROMPT = model_input([5, 6], IMAGE, [7, 8], IMAGE, [9])
PASS_INPUT = types.ModelInput(chunks=PROMPT.chunks[:-1])


def datum(prompt: types.ModelInput, image_token: int, **inputs: Any) -> types.Datum:
    tokens = [t for c in prompt.chunks for t in (c.tokens if hasattr(c, "tokens") else [image_token] * c.length)]
    return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": np.array([*tokens[1:], 9]), **inputs})


@pytest.fixture(scope="module")
def vision_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("vision")
    backend = new_backend("torch", save_vision_model(folder / "model", "idefics3"), {"cache_gib": 0.01}, BASE_MODEL)
    state = folder / "state"
    with serving(state, engine=False, backend="torch") as running, engine_for(running, backend):
        yield running


@pytest.fixture
def service(vision_server: Running) -> Iterator[tinker.ServiceClient]:
    client = vision_server.sdk()
    yield client
    client.close(status="success")


@pytest.fixture
def image_token(vision_server: Running) -> int:
    from transformers import AutoConfig

    folder = vision_server.config.checkpoints_base.parent / "model"
    return int(AutoConfig.from_pretrained(folder).image_token_id)


def test_training_and_samples_agree(vision_server: Running, service: tinker.ServiceClient, image_token: int) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    weights = np.array([0.0] * (PASS_INPUT.length - 1) + [1.0])
    losses = []
    for _ in range(3):
        step = training.forward_backward([datum(PASS_INPUT, image_token, weights=weights)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        losses.append(step.result().metrics["loss:sum"])
    assert losses[0] > losses[1] > losses[2]
    stored = pb.ForwardBackwardRequest.FromString(vision_server.rows(Kind.FORWARD_BACKWARD)[-1].payload)
    assert [chunk.image.data for chunk in stored.data[0].model_input[1::2]] == [IMAGE.data] * 2

    def logprobs(client: tinker.TrainingClient) -> np.ndarray:
        result = client.forward([datum(PASS_INPUT, image_token)], "cross_entropy").result()
        return np.array(result.loss_fn_outputs[0]["logprobs"].tolist())

    scores = logprobs(training)
    sampler = training.save_weights_and_get_sampling_client().result()
    np.testing.assert_allclose(sampler.compute_logprobs(PROMPT).result()[1:], scores, atol=1e-5)
    sampled = sampler.sample(PROMPT, 3, GREEDY, include_prompt_logprobs=True).result()
    assert len({tuple(one.tokens) for one in sampled.sequences}) == 1
    assert sampled.prompt_logprobs is not None
    np.testing.assert_allclose(sampled.prompt_logprobs[1:], scores, atol=1e-5)
    job = vision_server.rows(Kind.SAMPLE)[-1].payload
    assert job.count(base64.urlsafe_b64encode(IMAGE.data)[:40]) == 2
    assert len(job) < 2 * len(IMAGE.data) * 4 / 3 + 1000

    path = training.save_state("images").result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    np.testing.assert_array_equal(logprobs(resumed), scores)


def test_the_json_of_older_clients(vision_server: Running, service: tinker.ServiceClient, image_token: int) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4, seed=1).result()
    expected = training.forward([datum(PASS_INPUT, image_token)], "cross_entropy").result()
    targets = datum(PASS_INPUT, image_token).loss_fn_inputs["target_tokens"].tolist()
    image = {"data": base64.b64encode(IMAGE.data).decode(), "format": "png"}  # neither type nor expected_tokens
    chunks = [{"tokens": [5, 6]}, image, {"tokens": [7, 8]}, {"type": "image", **image, "expected_tokens": 4}]
    data = [
        {"model_input": {"chunks": chunks}, "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64"}}}
    ]
    body = {"model_id": training.model_id, "seq_id": 2, "forward_input": {"data": data, "loss_fn": "cross_entropy"}}
    sampled = {"prompt": {"chunks": chunks}, "sampling_params": {"max_tokens": 2}, "base_model": BASE_MODEL}
    with vision_server.client() as http:
        result = result_of(http, http.post("forward", json=body))
        assert result["metrics"] == pytest.approx(expected.metrics, rel=1e-6)
        assert result_of(http, http.post("asample", json=sampled))["sequences"][0]["tokens"]


MISTAKES: dict[str, tuple[str, Callable[[], types.ModelInput]]] = {
    "corrupt": ("prompt: an image cannot be decoded", lambda: model_input([5], image(data=IMAGE.data[:-300]))),
    "no image": ("prompt: an image has format='png', but", lambda: model_input([5], image(data=b"x"))),
    "other length": ("prompt: .* has expected_tokens=5, but", lambda: model_input([5], image(expected_tokens=5))),
    "too many tokens": ("expected_tokens=2000000000; use", lambda: model_input(image(expected_tokens=2 * 10**9))),
    "too long a prompt": ("the maximum for this prompt", lambda: model_input(image(expected_tokens=5000))),
    "pointer": (
        "chunk of kind image_asset_pointer; send .* images as image with data",
        lambda: types.ModelInput(chunks=[types.ImageAssetPointerChunk(format="png", location="x.png")]),
    ),
}


def image(**fields: Any) -> types.ImageChunk:
    return IMAGE.model_copy(update=fields)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, service: tinker.ServiceClient) -> None:
    words, prompt = MISTAKES[name]
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
    with pytest.raises((tinker.BadRequestError, tinker.RequestFailedError), match=words):
        sampler.sample(prompt(), 1, GREEDY).result()


def test_images_are_decoded_outside_of_database_sessions(
    vision_server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def count(backend: str, image: ImageInput) -> int:
        threads.append(threading.current_thread().name)
        return count_pixels(backend, image)

    monkeypatch.setattr("tx.tinker.submission.images.count_pixels", count)
    chunk = {"type": "image", "data": base64.b64encode(IMAGE.data).decode(), "format": "png"}
    sampled = {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}
    with vision_server.client() as http:
        assert result_of(http, http.post("asample", json=sampled))["sequences"][0]["tokens"]
    assert [name.rpartition("_")[0] for name in threads] == ["tx-compute"]


def test_many_images_of_unknown_length_are_not_read(vision_server: Running) -> None:
    chunk = {"type": "image", "data": base64.b64encode(IMAGE.data).decode(), "format": "png"}
    sampled = {"prompt": {"chunks": [chunk] * 4000}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}
    with vision_server.client() as http:
        request_id = http.post("asample", json=sampled).json()["request_id"]
        error = http.post("retrieve_future", json={"request_id": request_id}).text
    assert re.search(r"prompt has at least \d+ tokens; the maximum is", error)


def test_a_wrong_image_fails_the_step(service: tinker.ServiceClient, image_token: int) -> None:
    training = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    wrong = datum(model_input([5], image(expected_tokens=5), [6]), image_token)
    failed = training.forward_backward([wrong], "cross_entropy")
    step = training.optim_step(types.AdamParams())
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].model_input: .* has expected_tokens=5, but"):
        failed.result()
    with pytest.raises(tinker.RequestFailedError, match="the step was not applied"):
        step.result()


def test_a_server_for_text_names_the_fix(server: Running) -> None:
    chunk = {"type": "image", "data": base64.b64encode(IMAGE.data).decode(), "format": "png"}
    body = {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 1}, "base_model": BASE_MODEL}
    with server.client() as http:
        assert_refused(
            http.post("asample", json=body), "prompt: the JAX backend reads no images; start the server with"
        )
