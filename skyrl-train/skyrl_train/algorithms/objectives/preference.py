"""Preference losses: prefer the chosen answer of a prompt to the rejected one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from skyrl_train.lazy import torch
from skyrl_train.types import Metrics, MetricSums, TrainingBatch


class PairObjective(ABC):
    """Base class for the mean of a loss over pairs of answers. The chosen answer comes first in each pair.

    An answer is a trajectory, or a row of a batch without `trajectories`. A pair is a draw. If a pair does not fit into
    one micro-batch, rows are scored first, and the driver computes the gradient in the scores (`differentiate`).
    """

    scope = "draw"
    needs_entropy_grad = False
    score_name: ClassVar[Literal["logprobs", "values"]]
    """Score that the loss reads."""

    def add_weights(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch with weights 1 / pairs. Every row needs a trained token."""
        assert bool(mini_batch.loss_mask.any(dim=1).all()), "an answer has no trained token"
        return replace(mini_batch, loss_weights=torch.full_like(mini_batch.loss_mask, 1 / mini_batch.n_prompts))

    def differentiate(self, scores: torch.Tensor, mini_batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Return the mini-batch with the gradient of its loss in the scores (B, R), and metrics."""
        chosen = scores.detach().requires_grad_()
        losses, sums = self._losses(chosen, mini_batch)
        (gradient,) = torch.autograd.grad(losses.mean(), chosen)
        return replace(mini_batch, logprob_gradient=gradient), sums.metrics()

    def __call__(self, scores: Any, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return Σ weight · loss over the pairs in these rows, or after `differentiate` Σ gradient · score."""
        values = getattr(scores, self.score_name)
        if rows.logprob_gradient is not None:
            return (values * rows.logprob_gradient).sum(), Metrics()
        if not rows.loss_mask.any():  # a filler row, added so that all ranks have equally many micro-batches
            return values.sum() * 0, Metrics()
        assert rows.loss_weights is not None, "add_weights() comes first"
        losses, sums = self._losses(values, rows)
        return losses.sum() * rows.loss_weights[0, 0], sums.metrics()

    def evaluate(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> Metrics:
        """Return the metrics of pairs, from their scores (B, R)."""
        return self._losses(scores[self.score_name], rows)[1].metrics()

    @abstractmethod
    def _losses(self, scores: torch.Tensor, rows: TrainingBatch) -> tuple[torch.Tensor, MetricSums]:
        """Return the loss of each pair (P,), differentiable in the scores (B, R), and metrics."""


@dataclass(eq=False)
class PreferenceObjective(PairObjective):
    """Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290) and variants of it.

    h is the sum of log π - log π_ref over an answer's tokens. β · h is the answer's reward, and the margin of a pair is
    m = β (h_chosen - h_rejected). The loss `sigmoid` is -(1 - ε) log σ(m) - ε log σ(-m), where ε is `label_smoothing`
    (Mitchell, 2023). The loss `ipo` is (h_chosen - h_rejected - 1 / (2 β))², where h is the mean over tokens (Azar et
    al., 2023, arXiv:2310.12036).

    At the start π = π_ref, so m = 0 and the loss `sigmoid` is log 2 = 0.693.
    """

    beta: float
    label_smoothing: float = 0.0
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    score_name = "logprobs"

    def _losses(self, scores: torch.Tensor, rows: TrainingBatch) -> tuple[torch.Tensor, MetricSums]:
        assert rows.ref_logprobs is not None, "the reference is scored before the update"
        is_trained = rows.loss_mask > 0
        logprobs = _answer_sums(torch.where(is_trained, scores, 0.0), rows)  # (A,)
        ratios = logprobs - _answer_sums(torch.where(is_trained, rows.ref_logprobs, 0.0), rows)
        if self.loss_type == "ipo":
            means = ratios / _answer_sums(rows.loss_mask, rows)
            losses = (means[0::2] - means[1::2] - 1 / (2 * self.beta)).square()  # (P,)
        else:
            margins, smoothing = self.beta * (ratios[0::2] - ratios[1::2]), self.label_smoothing
            log_sigmoid = torch.nn.functional.logsigmoid
            losses = -(1 - smoothing) * log_sigmoid(margins) - smoothing * log_sigmoid(-margins)
        sums = _pair_metrics(losses, self.beta * ratios)
        sums.add_samples("chosen_logprob", logprobs[0::2])
        sums.add_samples("rejected_logprob", logprobs[1::2])
        return losses, sums


class RewardObjective(PairObjective):
    """Loss of a reward model under the Bradley-Terry model: -log σ(r_chosen - r_rejected).

    r is the value at the trained token of an answer's row.
    """

    score_name = "values"

    def _losses(self, scores: torch.Tensor, rows: TrainingBatch) -> tuple[torch.Tensor, MetricSums]:
        rewards = _answer_sums(torch.where(rows.loss_mask > 0, scores, 0.0), rows)  # (A,)
        losses = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2])  # (P,)
        return losses, _pair_metrics(losses, rewards)

    def mean_distance(self, scores: Mapping[str, torch.Tensor], rows: TrainingBatch) -> float:
        """Return the mean distance between the rewards of a pair, for scores (B, R)."""
        rewards = _answer_sums(torch.where(rows.loss_mask > 0, scores["values"], 0.0), rows)  # (A,)
        return (rewards[0::2] - rewards[1::2]).abs().mean().item()


def _answer_sums(values: torch.Tensor, rows: TrainingBatch) -> torch.Tensor:
    """Sum values (B, R) over the tokens of each answer (A,), in float64."""
    sums = values.double().sum(dim=1)  # (B,)
    if rows.trajectories is not None:
        _, answers = torch.unique_consecutive(rows.trajectories, return_inverse=True)  # (B,)
        sums = sums.new_zeros(int(answers[-1]) + 1).index_add(0, answers, sums)
    assert len(sums) % 2 == 0, f"{len(sums)} answers are not pairs"
    return sums


def _pair_metrics(losses: torch.Tensor, rewards: torch.Tensor) -> MetricSums:
    """Return metrics of pairs from their losses (P,) and the rewards of their answers (2 P,)."""
    margins = rewards[0::2] - rewards[1::2]
    sums = MetricSums()
    sums.add_samples("loss", losses)
    sums.add_samples("accuracy", (margins > 0).double())
    sums.add_samples("margin", margins)
    sums.add_samples("chosen_reward", rewards[0::2])
    sums.add_samples("rejected_reward", rewards[1::2])
    return sums
