"""User mistakes are reported at once, with the server's message."""

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tinker
from differences import client_of
from passes import Server, datum_of
from tinker import types

CE = "cross_entropy"
SECONDS = 10
"""Less than the retries of the SDKs take."""
PROMPT = types.ModelInput.from_ints([5])


class User(NamedTuple):
    """A user of a server, who makes mistakes."""

    server: Server
    service: tinker.ServiceClient
    training: tinker.TrainingClient

    def create(self, base_model: str = "", rank: int = 4) -> Any:
        return client_of(self.service.create_lora_training_client(base_model or self.server.base_model, rank=rank))

    def forward(self, *data: types.Datum) -> Any:
        return self.training.forward(list(data), CE).result()

    def train(self, loss: str) -> Any:
        return self.training.forward_backward(self.server.data, loss).result()

    def sampler(self, **options: Any) -> Any:
        return client_of(self.service.create_sampling_client(**options))

    def sample(self, prompt: types.ModelInput = PROMPT, max_tokens: int = 1, stop: Any = None, **options: Any) -> Any:
        params = types.SamplingParams(max_tokens=max_tokens, stop=stop)
        return self.sampler(base_model=self.server.base_model).sample(prompt, 1, params, **options).result()

    def sample_for_another_loss(self) -> Any:
        sampler = self.sampler(base_model=self.server.base_model, record_stability_info=True)
        return sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=1)).result()


def image() -> types.Datum:
    chunk = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    inputs = {"target_tokens": np.array([1])}
    return types.Datum(model_input=types.ModelInput(chunks=[chunk]), loss_fn_inputs=inputs)


def resume(user: User) -> Any:
    return client_of(user.service.create_training_client_from_state(f"tinker://{user.training.model_id}/weights/gone"))


MISTAKES: dict[str, tuple[str, Callable[[User], Any]]] = {
    "another model": ("'other/model' is not served here", lambda user: user.create("other/model")),
    "too large a rank": ("rank=100000 is more than", lambda user: user.create(rank=100000)),
    "lacking input": ("lacks 'logprobs'", lambda user: user.train("ppo")),
    "no such token": ("has token 99999", lambda user: user.forward(datum_of([99999], [5]))),
    "no such checkpoint": ("there is no checkpoint", resume),
    "no name": ("cannot name a checkpoint", lambda user: user.training.save_state("../../up").result()),
    "checkpoint path": ("is not a checkpoint path", lambda user: user.sampler(model_path="tinker://x/y")),
    "no token to sample from": ("is empty", lambda user: user.sample(types.ModelInput.from_ints([]))),
    "too long a sample": ("the maximum for this prompt is", lambda user: user.sample(max_tokens=100000)),
    "too long a text to stop at": ("99 characters", lambda user: user.sample(stop=["x" * 99])),
    "too many of the likeliest": ("topk_prompt_logprobs=2000", lambda user: user.sample(topk_prompt_logprobs=2000)),
}
"""For every SDK."""

if hasattr(types, "DimuonParams"):  # older ones do not send it, or have their own message
    MISTAKES |= {
        "another optimizer": (
            "'dimuon' is not supported",
            lambda user: user.training.optim_step(types.DimuonParams(learning_rate=0.1)).result(),
        ),
        "no such loss": ("loss_fn='mean'", lambda user: user.train("mean")),
        "a weight that is no number": ("is nan", lambda user: user.forward(datum_of([5], [6], weights=[np.nan]))),
        "an image": ("reads no images", lambda user: user.forward(image())),
    }
if "prompt_logprobs_last_n" in inspect.signature(tinker.SamplingClient.sample).parameters:
    MISTAKES["some log-probs of a prompt"] = (
        "prompt_logprobs_last_n is not supported",
        lambda user: user.sample(include_prompt_logprobs=True, prompt_logprobs_last_n=1),
    )
if "record_stability_info" in inspect.signature(tinker.ServiceClient.create_sampling_client).parameters:
    MISTAKES["samples for a loss that is not there"] = (
        "'stable_reinforce', which is not supported; use importance_",
        User.sample_for_another_loss,
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """A user error is raised at once, with the server's message."""
    words, mistake = MISTAKES[name]
    started = time.monotonic()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError, tinker.RequestFailedError), match=words):
        mistake(User(server, service, training))
    assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize("where", [0, 2499])
def test_a_wrong_datum_among_many(where: int, training: tinker.TrainingClient) -> None:
    """A step fails as a whole if a part of the data before it is wrong, and the next one succeeds."""
    right = datum_of([5], [6])
    before = training.forward([right], CE).result().metrics["loss:sum"]
    data = [right] * 2500  # several requests
    data[where] = datum_of([99999], [6])
    trained = training.forward_backward(data, CE)
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
    for future in (trained, stepped):
        with pytest.raises(tinker.RequestFailedError, match="has token 99999"):
            future.result()
    assert training.forward([right], CE).result().metrics["loss:sum"] == before
    training.forward_backward([right], CE).result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert training.forward([right], CE).result().metrics["loss:sum"] < before


def test_a_name_that_is_taken(training: tinker.TrainingClient) -> None:
    """A checkpoint is not overwritten by accident."""
    training.save_state("taken").result()
    started = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match="already"):
        training.save_state("taken").result()
    assert time.monotonic() - started < SECONDS
