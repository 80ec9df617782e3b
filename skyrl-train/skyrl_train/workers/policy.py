"""The policy: one call of `update` is one optimizer step on one mini-batch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.contract import returns_scalar
from skyrl_train.algorithms.off_policy import rollout_gap_metrics
from skyrl_train.algorithms.registry import PolicyLoss, reads_whole_batch
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.models.logprobs import TokenScores
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.objective import (
    Terms,
    Weights,
    policy_terms,
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
        policy_loss: PolicyLoss,
        n_optimizer_steps: int,
    ) -> None:
        """`n_optimizer_steps` is the length of the whole run, which the schedule is laid over."""
        super().__init__(model, tokenizer, cfg.policy.optimizer_config, n_optimizer_steps)
        self._cfg = cfg
        self._policy_loss = policy_loss
        self._needs_whole_batch = reads_whole_batch(policy_loss) or returns_scalar(policy_loss, cfg.algorithm)

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
        parts = micro_batch_rows(batch, self._cfg, self._cfg.micro_train_batch_size_per_gpu)
        weights = Weights.of(batch, algorithm)
        pull: torch.Tensor | None = None
        totals: Terms = {}
        if self._needs_whole_batch and len(parts) > 1:
            pull, totals = self._whole_batch_pull(batch, weights)
        started_from = torch.zeros_like(batch.loss_mask)  # (B, R)
        for rows in parts:
            part, part_weights = batch.select(rows).to(device), weights.select(rows).to(device)
            with self.checkpointed_layers():
                scores = micro_batch_scores(self.model, part, self._cfg)  # (b, R)
                terms = regularisation_terms(scores, part, part_weights, algorithm)
                if pull is None:
                    terms |= policy_terms(self._policy_loss, scores.logprobs, part, part_weights, algorithm)
                    policy_loss = terms["policy_loss"]
                else:
                    policy_loss = (scores.logprobs * pull[rows].to(device)).sum()
                total_loss(policy_loss, terms, algorithm).backward()
            for name, value in terms.items():
                totals[name] = totals.get(name, 0.0) + value.detach()
            started_from[rows] = start_logprobs(scores.logprobs, part).cpu()
        if totals:
            totals["final_loss"] = total_loss(totals["policy_loss"], totals, algorithm)
        metrics = {name: float(total) for name, total in totals.items()}
        if batch.rollout_logprobs is not None:
            metrics |= rollout_gap_metrics(started_from, batch.rollout_logprobs, batch.loss_mask)
        return {f"policy/{name}": value for name, value in metrics.items()}

    def _whole_batch_pull(self, batch: TrainingBatch, weights: Weights) -> tuple[torch.Tensor, Terms]:
        """The gradient (B, R) of the policy loss in each log-prob, and the terms it comes with.

        A loss that compares tokens across the mini-batch, or reduces by itself, sees all of it at once; by the chain
        rule its gradient in the log-probs is all that the micro-batches need.
        """
        log_probs = self.score(batch).logprobs.requires_grad_()
        terms = policy_terms(self._policy_loss, log_probs, batch, weights, self._cfg.algorithm)
        (pull,) = torch.autograd.grad(terms["policy_loss"], log_probs)
        return pull, {name: value.detach() for name, value in terms.items()}
