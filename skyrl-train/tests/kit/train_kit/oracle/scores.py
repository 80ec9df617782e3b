"""Scores of the sampled tokens by each model, and the gradients of what is computed from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from train_kit.oracle.rollouts import OracleRow, OracleTrajectory

Gradient = dict[str, torch.Tensor]
"""Gradient by parameter name."""


@dataclass(frozen=True)
class Scores:
    """Values of one row's sampled tokens, in order; (n,) each."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    sum_pi_squared: torch.Tensor


def score_row(model: torch.nn.Module, row: OracleRow, temperature: float) -> Scores:
    """Score the sampled tokens of a row with a language model."""
    logits = model(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0]  # (L, V)
    logprobs, entropies, squares = [logits.new_zeros(0)], [logits.new_zeros(0)], [logits.new_zeros(0)]
    for position in row.sampled_positions:
        distribution = torch.log_softmax(logits[position - 1] / temperature, dim=-1)
        logprobs.append(distribution[row.token_ids[position]][None])
        entropies.append(-(distribution.exp() * distribution).sum()[None])
        squares.append((2 * distribution).exp().sum().detach()[None])
    return Scores(torch.cat(logprobs), torch.cat(entropies), torch.cat(squares))


def value_row(model: torch.nn.Module, row: OracleRow) -> torch.Tensor:
    """Return the critic's value (n,) of the state before each sampled token of a row."""
    outputs = model(input_ids=torch.tensor([row.token_ids]), use_cache=False).logits[0, :, 0]
    return outputs[[position - 1 for position in row.sampled_positions]]


class Differentiable:
    """Outputs of a model as new leaves, with their Jacobian.

    By the chain rule, the gradient of any loss of the outputs is its gradient at the leaves times the Jacobian. The
    Jacobian costs a backward pass per output, once; then each loss is differentiated without the model.
    """

    def __init__(self, model: torch.nn.Module, outputs: Sequence[torch.Tensor]) -> None:
        names, parameters = zip(*model.named_parameters(), strict=True)
        rows = [torch.autograd.grad(x, parameters, retain_graph=True) for part in outputs for x in part]
        self._jacobian = {
            name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)
        }
        self._leaf = torch.cat(list(outputs)).detach().requires_grad_()
        self.outputs = self._leaf.split([len(part) for part in outputs])
        """The same values as those passed in."""

    def gradient(self, loss: torch.Tensor) -> Gradient:
        """Return the gradient of a loss of `outputs`; the graph of the loss is kept."""
        (weights,) = torch.autograd.grad(loss, self._leaf, retain_graph=True)
        return {name: torch.tensordot(weights, jacobian, 1) for name, jacobian in self._jacobian.items()}


class OracleScores:
    """Scores of every row of every trajectory by all models; those of the trained models are differentiable."""

    def __init__(
        self,
        trajectories: Sequence[OracleTrajectory],
        temperature: float,
        *,
        policy: torch.nn.Module,
        old: torch.nn.Module,
        ref: torch.nn.Module,
        critic: torch.nn.Module,
        old_critic: torch.nn.Module,
    ) -> None:
        rows = [row for t in trajectories for row in t.rows]
        new = [score_row(policy, row, temperature) for row in rows]
        self.policy = Differentiable(policy, [part for row in new for part in (row.logprobs, row.entropies)])
        self.critic = Differentiable(critic, [value_row(critic, row) for row in rows])
        with torch.no_grad():
            self.old, self.ref = ([score_row(model, row, temperature) for row in rows] for model in (old, ref))
            self.old_values = [value_row(old_critic, row) for row in rows]
        self.values = self.critic.outputs
        outputs = self.policy.outputs
        self.new = [
            Scores(logprobs, entropies, row.sum_pi_squared)
            for row, logprobs, entropies in zip(new, outputs[::2], outputs[1::2], strict=True)
        ]
