"""What a user does wrong is said at once, in the server's words."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import tinker
from conftest import Server, datum_of
from differences import client_of
from tinker import types

CE = "cross_entropy"
SECONDS = 10
"""Less than the SDKs take when they try again."""
PROMPT = types.ModelInput.from_ints([5])

Mistake = Callable[[Server, tinker.ServiceClient, tinker.TrainingClient], Any]
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
        "and the model takes",
        lambda server, service, training: training.forward_backward(
            [datum_of([5] * (server.context + 1), [5] * (server.context + 1))], CE
        ).result(),
    ),
    "no such token": (
        "holds token 99999",
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
    "too long a sample": (
        "the most for this prompt is",
        lambda server, service, training: (
            client_of(service.create_sampling_client(base_model=server.base_model))
            .sample(PROMPT, 1, types.SamplingParams(max_tokens=100000))
            .result()
        ),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str, server: Server, service: tinker.ServiceClient, training: tinker.TrainingClient) -> None:
    """A mistake is raised at once, with the server's words."""
    words, mistake = MISTAKES[name]
    started = time.monotonic()
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError), match=words):
        mistake(server, service, training)
    assert time.monotonic() - started < SECONDS


def test_a_name_that_is_taken(training: tinker.TrainingClient) -> None:
    """A checkpoint is not overwritten by accident."""
    training.save_state("taken").result()
    started = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match="already"):
        training.save_state("taken").result()
    assert time.monotonic() - started < SECONDS


def test_a_failing_custom_loss(server: Server, training: tinker.TrainingClient) -> None:
    """An error in a custom loss is the user's own."""

    def loss(data: list[types.Datum], logprobs: list) -> tuple:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        training.forward_backward_custom(server.data, loss).result()
