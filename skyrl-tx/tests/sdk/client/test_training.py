"""Passes and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tinker
from differences import needs
from passes import ADAM, Server, assert_close, datum_of, distance, logprobs_of, outputs_of, step
from tinker import types

NewTraining = Callable[[], tinker.TrainingClient]
SAME = 2e-5
"""Tolerance for sums in different orders, after a step."""


def again(data: list[types.Datum], inputs: Callable[[types.Datum, int], dict]) -> list[types.Datum]:
    """Return the same tokens and targets with other inputs."""
    return [
        datum_of(datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist(), **inputs(datum, number))
        for number, datum in enumerate(data)
    ]


def test_cross_entropy(server: Server, training: tinker.TrainingClient) -> None:
    """Cross-entropy and token log-probs match Hugging Face."""
    output = training.forward_backward(server.data, "cross_entropy").result()
    assert abs(output.metrics["loss:sum"] - server.loss) < 1e-4 * abs(server.loss)
    assert_close(outputs_of(output), server.logprobs, atol=1e-4)


def test_forward(server: Server, new_training: NewTraining) -> None:
    """`forward` does not change weights or gradients."""
    quiet, usual, disturbed = new_training(), new_training(), new_training()
    before = logprobs_of(quiet, server.data)
    quiet.optim_step(ADAM).result()
    assert distance(logprobs_of(quiet, server.data), before) == 0
    step(usual, [server.data])
    disturbed.forward_backward(server.data, "cross_entropy").result()
    assert distance(logprobs_of(disturbed, server.data), before) == 0
    disturbed.optim_step(ADAM).result()
    assert distance(logprobs_of(disturbed, server.data), logprobs_of(usual, server.data)) == 0
    assert distance(logprobs_of(usual, server.data), before) > 0.1


def test_sums(server: Server, new_training: NewTraining) -> None:
    """One call with many data equals many calls with one."""
    together, apart = new_training(), new_training()
    step(together, [server.data])
    step(apart, [[datum] for datum in server.data])
    found = logprobs_of(together, server.data)
    assert_close(logprobs_of(apart, server.data), found, atol=SAME)
    assert distance(found, server.logprobs) > 0.1


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


def test_negative_weights(server: Server, new_training: NewTraining) -> None:
    """Negative weights are neither clamped nor normalized."""
    towards, away = new_training(), new_training()
    data = again(server.data, lambda datum, _: {"weights": -2 * datum.loss_fn_inputs["weights"].to_numpy()})
    output = away.forward_backward(data, "cross_entropy").result()
    assert abs(output.metrics["loss:sum"] + 2 * server.loss) < 2e-4 * abs(server.loss)
    away.optim_step(ADAM).result()
    step(towards, [server.data])
    losses = [client.forward(server.data, "cross_entropy").result().metrics["loss:sum"] for client in (towards, away)]
    assert losses[0] < server.loss < losses[1]


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


def test_custom_loss_of_pairs(server: Server, training: tinker.TrainingClient) -> None:
    """A custom loss over pairs, with gradients of both signs, learns the preference."""
    import torch

    def loss(data: list[types.Datum], logprobs: list) -> tuple:
        margin = logprobs[0].sum() - logprobs[1].sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin:mean": margin.item()}

    pair = server.data[:2]
    margins = []
    for _ in range(4):
        margins.append(training.forward_backward_custom(pair, loss).result().metrics["margin:mean"])
        training.optim_step(ADAM).result()
    assert margins[3] > margins[2] > margins[1] > margins[0]


def policy_data(server: Server, logprobs: list[np.ndarray], advantage: float) -> list[types.Datum]:
    """Return data whose targets were sampled with these log-probs."""
    return again(
        server.data, lambda _, n: {"logprobs": logprobs[n], "advantages": np.full(len(logprobs[n]), advantage)}
    )


def test_policy_losses(server: Server, new_training: NewTraining) -> None:
    """On policy, importance sampling, PPO and CISPO are cross-entropy weighted with advantages."""
    weighted = new_training()
    before = logprobs_of(weighted, server.data)
    step(weighted, [again(server.data, lambda _, n: {"weights": np.full(len(before[n]), -0.5)})])
    expected = logprobs_of(weighted, server.data)
    assert distance(expected, before) > 0.1
    for loss in ("importance_sampling", "ppo", "cispo"):
        client = new_training()
        step(client, [policy_data(server, before, advantage=-0.5)], loss)
        assert_close(logprobs_of(client, server.data), expected, atol=SAME)


def test_clipping(server: Server, new_training: NewTraining) -> None:
    """PPO ignores clipped tokens, and its thresholds can be set."""
    off_policy = [q - 0.5 for q in server.logprobs]  # ratios of 1.65
    data = policy_data(server, off_policy, advantage=1.0)
    clipped, wide = new_training(), new_training()
    clipped.forward_backward(data, "ppo").result()
    wide.forward_backward(data, "ppo", {"clip_low_threshold": 0.1, "clip_high_threshold": 3.0}).result()
    for client in (clipped, wide):
        client.optim_step(ADAM).result()
    assert distance(logprobs_of(clipped, server.data), server.logprobs) < 1e-4
    assert distance(logprobs_of(wide, server.data), server.logprobs) > 0.1


def test_two_models(server: Server, new_training: NewTraining) -> None:
    """Two adapters on one base model do not affect each other."""
    one, other = new_training(), new_training()
    before = logprobs_of(other, server.data)
    step(one, [server.data])
    assert distance(logprobs_of(other, server.data), before) == 0
    assert distance(logprobs_of(one, server.data), before) > 0.1
