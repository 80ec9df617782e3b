"""The server under test, and shorthands for passes and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

ADAM = types.AdamParams(learning_rate=0.01)


@dataclass(frozen=True)
class Server:
    """A running server, with data for its model and the reference log-probs of their targets."""

    url: str
    base_model: str
    is_compressing: bool
    data: list[types.Datum]
    logprobs: list[np.ndarray]

    @property
    def loss(self) -> float:
        """The cross-entropy of the reference."""
        weights = [datum.loss_fn_inputs["weights"].to_numpy() for datum in self.data]
        return -float(sum((w * lp).sum() for w, lp in zip(weights, self.logprobs, strict=True)))


def datum_of(tokens: list[int], targets: list[int], **inputs: Any) -> types.Datum:
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs={"target_tokens": np.asarray(targets), **arrays}
    )


def logprobs_of(training: tinker.TrainingClient, data: list[types.Datum]) -> list[np.ndarray]:
    return outputs_of(training.forward(data, "cross_entropy").result())


def outputs_of(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


def step(training: tinker.TrainingClient, calls: Sequence[list[types.Datum]], loss: str = "cross_entropy") -> None:
    """Run passes, all sent before any result is awaited, and one optimizer step."""
    passes = [training.forward_backward(data, loss) for data in calls]
    stepped = training.optim_step(ADAM)
    for one in passes:
        one.result()
    stepped.result()


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray], atol: float) -> None:
    """Compare log-probs with a tolerance of `atol`."""
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


def distance(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))
