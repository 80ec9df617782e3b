"""The policy: one call of `update` is one optimizer step on one mini-batch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.contract import ResolvedPolicyLoss
from skyrl_train.algorithms.off_policy import rollout_gap_metrics
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.models.loading import checkpointed_layers
from skyrl_train.models.logprobs import TokenScores
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.objective import (
    Terms,
    Weights,
    policy_objective,
    regularisation_terms,
    start_logprobs,
    total_loss,
)
from skyrl_train.workers.scoring import micro_batch_rows, micro_batch_scores, score_tokens
from skyrl_train.workers.trained_model import TrainedModel


class PolicyWorker(TrainedModel):
    """Owns the policy's weights, optimizer and learning-rate schedule."""

    role = "policy"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cfg: TrainerConfig,
        policy_loss: ResolvedPolicyLoss,
        n_optimizer_steps: int,
    ) -> None:
        """`n_optimizer_steps` is the length of the whole run, which the schedule is laid over."""
        super().__init__(model, tokenizer, cfg.policy.optimizer_config, n_optimizer_steps)
        self._cfg = cfg
        self._policy_loss = policy_loss
        self._needs_whole_batch = policy_loss.scope == "batch"

    def score(self, batch: TrainingBatch) -> TokenScores:
        """What the current weights say about the batch's sampled tokens (B, R)."""
        return score_tokens(self.model, batch, self._cfg)

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics."""
        return self.forward_backward(batch) | self.optim_step()

    def forward_backward(self, batch: TrainingBatch) -> dict[str, float]:
        """Add the gradient of a mini-batch's loss to the parameters; returns its metrics.

        The mini-batch is worked through in micro-batches, each scaled by the divisors of the whole. Without
        `old_logprobs` the batch is the only one since its rollouts, and the current log-probs are the old ones.
        """
        algorithm, device = self._cfg.algorithm, self.model.device
        weights = Weights.of(batch, algorithm)
        parts = micro_batch_rows(batch, self._cfg, self._cfg.micro_train_batch_size_per_gpu)
        totals: Terms = {}  # sums over the micro-batches
        logprob_gradient: torch.Tensor | None = None  # (B, R)
        if self._needs_whole_batch:
            trained = sorted(row for part in parts for row in part)  # the rows, and their order, are always these
            if len(parts) > 1:
                logprob_gradient, totals = self._whole_batch_gradient(batch, weights, trained)
            else:
                parts = [trained] if trained else []
        old_logprobs = torch.zeros_like(batch.loss_mask)  # (B, R)
        for rows in parts:
            part, part_weights = batch.select(rows).to(device), weights.select(rows).to(device)
            with checkpointed_layers(self.model):
                scores = micro_batch_scores(self.model, part, self._cfg)  # (b, R)
                terms = regularisation_terms(scores, part, part_weights, algorithm)
                if logprob_gradient is None:
                    loss, metrics = policy_objective(self._policy_loss, scores.logprobs, part, part_weights, algorithm)
                    _add(totals, {"policy_loss": loss, **metrics})
                else:
                    loss = (scores.logprobs * logprob_gradient[rows].to(device)).sum()
                total_loss(loss, terms, algorithm).backward()
            _add(totals, terms)
            old_logprobs[rows] = start_logprobs(scores.logprobs, part).detach().cpu()
        if totals:
            totals["final_loss"] = total_loss(totals["policy_loss"], totals, algorithm)
        measured = {name: float(total) for name, total in totals.items()}
        if batch.rollout_logprobs is not None:
            measured |= rollout_gap_metrics(old_logprobs, batch.rollout_logprobs, batch.loss_mask)
        return {f"policy/{name}": value for name, value in measured.items()}

    def _whole_batch_gradient(
        self, batch: TrainingBatch, weights: Weights, trained: list[int]
    ) -> tuple[torch.Tensor, Terms]:
        """The gradient (B, R) of the policy loss in each log-prob, and the loss with its metrics.

        A loss that compares tokens across the mini-batch, or reduces by itself, sees all of it at once; by the chain
        rule its gradient in the log-probs is all that the micro-batches need.
        """
        whole = batch.select(trained)
        log_probs = self.score(whole).logprobs.requires_grad_()
        loss, metrics = policy_objective(
            self._policy_loss, log_probs, whole, weights.select(trained), self._cfg.algorithm
        )
        gradient = torch.zeros_like(batch.loss_mask)
        (gradient[trained],) = torch.autograd.grad(loss, log_probs)
        return gradient, {"policy_loss": loss.detach(), **metrics}


def _add(totals: Terms, terms: Terms) -> None:
    """Add the terms of a micro-batch to those of the mini-batch, without gradient."""
    for name, value in terms.items():
        totals[name] = totals[name] + value.detach() if name in totals else value.detach()
