"""User mistakes are reported at once, with the server's message."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from differences import client_of
from passes import Server, datum_of
from tinker import types

CE = "cross_entropy"
SECONDS = 10
"""Less than the retries of the SDKs take."""
PARAMS = {"max_tokens", "stop"}
PROMPT = types.ModelInput.from_ints([5])

Mistake = Callable[[Server, tinker.ServiceClient, tinker.TrainingClient], Any]


def image() -> types.Datum:
    """Return a datum with an image only."""
    chunk = types.ImageChunk(data=b"x", format="png", expected_tokens=1)
    inputs = {"target_tokens": np.array([1])}
    return types.Datum(model_input=types.ModelInput(chunks=[chunk]), loss_fn_inputs=inputs)


def asking(prompt: types.ModelInput = PROMPT, **options: Any) -> Mistake:
    """Return a sample request of the base model."""
    params = types.SamplingParams(**{"max_tokens": 1, **{name: options.pop(name) for name in PARAMS & options.keys()}})

    def ask(server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> Any:
        sampler = client_of(service.create_sampling_client(base_model=server.base_model))
        return sampler.sample(prompt, 1, params, **options).result()

    return ask


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "another model": (
        "'other/model' is not served here",
        lambda server, service, training: client_of(service.create_lora_training_client("other/model", rank=4)),
    ),
    "too large a rank": (
        "rank=100000 is more than",
        lambda server, service, training: client_of(service.create_lora_training_client(server.base_model, 100000)),
    ),
    "lacking input": (
        "lacks 'logprobs'",
        lambda server, service, training: training.forward_backward(server.data, "ppo").result(),
    ),
    "too few weights": (
        r"shape \[1\]",
        lambda server, service, training: training.forward([datum_of([5, 6], [6, 7], weights=[1])], CE).result(),
    ),
    "too long": (
        "the maximum is",
        lambda server, service, training: training.forward_backward(
            [datum_of([5] * (server.context + 1), [5] * (server.context + 1))], CE
        ).result(),
    ),
    "no such token": (
        "has token 99999",
        lambda server, service, training: training.forward([datum_of([99999], [5])], CE).result(),
    ),
    "no such checkpoint": (
        "there is no checkpoint",
        lambda server, service, training: client_of(
            service.create_training_client_from_state(f"tinker://{training.model_id}/weights/gone")
        ),
    ),
    "no name": (
        "cannot name a checkpoint",
        lambda server, service, training: training.save_state("../../up").result(),
    ),
    "no such setting": (
        "'beta'",
        lambda server, service, training: training.forward_backward(server.data, CE, {"beta": 1.0}).result(),
    ),
    "a misspelled input": (
        "'weight', which no loss uses",
        lambda server, service, training: training.forward([datum_of([5], [6], weight=[1])], CE).result(),
    ),
    "checkpoint path": (
        "is not a checkpoint path",
        lambda server, service, training: client_of(service.create_sampling_client(model_path="tinker://x/y")),
    ),
    "no token to sample from": ("is empty", asking(types.ModelInput.from_ints([]))),
    "no such token to sample from": ("has token 99999", asking(types.ModelInput.from_ints([99999]))),
    "too long a sample": ("the maximum for this prompt is", asking(max_tokens=100000)),
    "too long a text to stop at": ("99 characters", asking(stop=["x" * 99])),
    "too many of the likeliest": ("topk_prompt_logprobs=2000", asking(topk_prompt_logprobs=2000)),
}
"""For every SDK."""

if hasattr(types, "DimuonParams"):  # older ones do not send it, or have their own message
    MISTAKES |= {
        "another optimizer": (
            "'dimuon' is not supported",
            lambda server, service, training: training.optim_step(types.DimuonParams(learning_rate=0.1)).result(),
        ),
        "no such loss": (
            "loss_fn='mean'",
            lambda server, service, training: training.forward_backward(server.data, "mean").result(),
        ),
        "a weight that is no number": (
            "is nan",
            lambda server, service, training: training.forward([datum_of([5], [6], weights=[np.nan])], CE).result(),
        ),
        "an image": (
            "chunk of kind image",
            lambda server, service, training: training.forward([image()], CE).result(),
        ),
    }
if "prompt_logprobs_last_n" in inspect.signature(tinker.SamplingClient.sample).parameters:
    MISTAKES["some log-probs of a prompt"] = (
        "prompt_logprobs_last_n is not supported",
        asking(include_prompt_logprobs=True, prompt_logprobs_last_n=1),
    )
if "record_stability_info" in inspect.signature(tinker.ServiceClient.create_sampling_client).parameters:
    MISTAKES["samples for a loss that is not there"] = (
        "'stable_reinforce', which is not supported; use importance_",
        lambda server, service, training: (
            client_of(service.create_sampling_client(base_model=server.base_model, record_stability_info=True))
            .sample(PROMPT, 1, types.SamplingParams(max_tokens=1))
            .result()
        ),
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """A user error is raised at once, with the server's message."""
    words, mistake = MISTAKES[name]
    started = time.monotonic()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError, tinker.RequestFailedError), match=words):
        mistake(server, service, training)
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
