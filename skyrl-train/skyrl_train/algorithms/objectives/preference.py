"""Preferences: of two answers to a prompt, make the chosen one more likely than the rejected one."""

from __future__ import annotations

from dataclasses import replace

from skyrl_train.lazy import torch
from skyrl_train.types import Metrics, MetricSums, TokenScores, TrainingBatch


class PreferenceObjective:
    """Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290).

    The loss of a pair is -log σ(β · (h_chosen - h_rejected)), where h is the sum over an answer's tokens of
    log π - log π_ref; that of a mini-batch is the mean over its pairs. Rows 2i and 2i + 1 are the chosen and the
    rejected answer of pair i.

    The driver computes the gradient in the log-probs, so that the rows of a pair may be on different ranks.
    """

    scope = "batch"
    needs_entropy_grad = False

    def __init__(self, beta: float) -> None:
        self._beta = beta

    def weigh(self, mini_batch: TrainingBatch) -> TrainingBatch:
        """Return the mini-batch unchanged: `differentiate` divides by the number of pairs."""
        return mini_batch

    def differentiate(self, log_probs: torch.Tensor, mini_batch: TrainingBatch) -> tuple[TrainingBatch, Metrics]:
        """Return the mini-batch with the gradient of its loss in `log_probs` (B, R), and metrics.

        Every row needs a trained token, and `ref_logprobs`.
        """
        assert mini_batch.ref_logprobs is not None, "the reference is scored before the update"
        assert len(mini_batch) % 2 == 0, f"{len(mini_batch)} rows are not pairs"
        assert bool(mini_batch.loss_mask.any(dim=1).all()), "an answer has no trained token"
        chosen = log_probs.detach().requires_grad_()
        is_trained = mini_batch.loss_mask > 0
        ratios = torch.where(is_trained, chosen - mini_batch.ref_logprobs, 0.0).sum(dim=1)  # (B,)
        margins = self._beta * (ratios[0::2] - ratios[1::2])  # (B / 2,)
        losses = -torch.nn.functional.logsigmoid(margins)
        (gradient,) = torch.autograd.grad(losses.mean(), chosen)
        sums = MetricSums()
        sums.add_samples("loss", losses)
        sums.add_samples("margin", margins)
        sums.add_samples("accuracy", (margins > 0).float())
        return replace(mini_batch, logprob_gradient=gradient), sums.metrics()

    def __call__(self, scores: TokenScores, rows: TrainingBatch) -> tuple[torch.Tensor, Metrics]:
        """Return Σ logprob_gradient · log π, which has the gradient of the loss."""
        assert rows.logprob_gradient is not None, "differentiate() comes first"
        return (scores.logprobs * rows.logprob_gradient).sum(), Metrics()
