from collections.abc import Callable
from typing import Any

import tinker
from differences import needs
from passes import ADAM, Server, assert_close, datum_of, logprobs_of, outputs_of, step
from tinker import types

NewTraining = Callable[[], tinker.TrainingClient]
SAME = 2e-5
"""Tolerance for sums in different orders, after a step."""


def test_cross_entropy(server: Server, training: tinker.TrainingClient) -> None:
    """Cross-entropy and token log-probs match Hugging Face."""
    output = training.forward_backward(server.data, "cross_entropy").result()
    assert abs(output.metrics["loss:sum"] - server.loss) < 1e-4 * abs(server.loss)
    assert_close(outputs_of(output), server.logprobs, atol=1e-4)


def test_chunks(server: Server, new_training: NewTraining) -> None:
    """A call that the SDK splits equals separate calls."""
    data = [datum_of([n % 50 + 6, 7], [7, 8], weights=[1, 1]) for n in range(1030)]
    whole, halves = new_training(), new_training()
    output = whole.forward_backward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == len(data)
    assert_close(outputs_of(output)[:2], outputs_of(output)[50:52], atol=1e-6)
    total = -sum(one.sum() for one in outputs_of(output))
    assert abs(output.metrics["loss:sum"] - total) < 1e-4 * total
    whole.optim_step(ADAM).result()
    step(halves, [data[:515], data[515:]])
    assert_close(logprobs_of(whole, server.data), logprobs_of(halves, server.data), atol=SAME)


def test_custom_loss(server: Server, new_training: NewTraining) -> None:
    """A custom loss that computes cross-entropy equals cross-entropy."""

    def loss(data: list[types.Datum], logprobs: list) -> tuple:
        weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
        return -sum((w * lp).sum() for w, lp in zip(weights, logprobs, strict=True)), {"n:sum": float(len(data))}

    custom, usual = new_training(), new_training()
    output = custom.forward_backward_custom(server.data, loss).result()
    assert abs(output.metrics["loss:sum"] - server.loss) < 1e-4 * abs(server.loss)
    assert output.metrics["n:sum"] == len(server.data)
    custom.optim_step(ADAM).result()
    step(usual, [server.data])
    assert_close(logprobs_of(custom, server.data), logprobs_of(usual, server.data), atol=SAME)


@needs(tinker.ServiceClient, "create_custom_loss")
def test_traced_custom_loss(server: Server, service: tinker.ServiceClient, new_training: NewTraining) -> None:
    """A custom loss that the SDK traces equals cross-entropy."""

    def loss(logprobs: Any, weights: Any) -> tuple:
        total = -(logprobs * weights).sum()
        return total, {"custom/mine:sum": total}

    handle = service.create_custom_loss(loss, input_ranks={"logprobs": 1, "weights": 1}).result()
    traced, usual = new_training(), new_training()
    output = traced.forward_backward_custom(server.data, handle).result()
    assert abs(output.metrics["custom/mine:sum"] - server.loss) < 1e-4 * abs(server.loss)
    traced.optim_step(ADAM).result()
    step(usual, [server.data])
    assert_close(logprobs_of(traced, server.data), logprobs_of(usual, server.data), atol=SAME)
