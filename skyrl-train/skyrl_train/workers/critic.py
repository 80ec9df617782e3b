"""The critic: estimates the rewards still to come, and learns from the ones that came."""

from __future__ import annotations

from collections import defaultdict

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.algorithms.losses import value_loss
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.models.loading import autocast, checkpointed_layers
from skyrl_train.models.value_head import response_values
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.scoring import micro_batch_rows
from skyrl_train.workers.trained_model import TrainedModel


class CriticWorker(TrainedModel):
    """Owns the critic's weights, optimizer and learning-rate schedule."""

    role = "critic"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cfg: TrainerConfig,
        n_optimizer_steps: int,
    ) -> None:
        """`n_optimizer_steps` is the length of the whole run, which the schedule is laid over."""
        super().__init__(model, tokenizer, cfg.critic.optimizer_config, n_optimizer_steps)
        self._cfg = cfg

    @torch.no_grad()
    def score(self, batch: TrainingBatch) -> torch.Tensor:
        """Values (B, R) of the states that the batch's tokens were sampled in, 0 elsewhere, on the CPU."""
        values = torch.zeros_like(batch.loss_mask)
        for rows in micro_batch_rows(batch, self._cfg, self._cfg.micro_forward_batch_size_per_gpu):
            values[rows] = self._values(batch.select(rows).to(self.model.device)).cpu()
        return values

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics."""
        return self.forward_backward(batch) | self.optim_step()

    def forward_backward(self, batch: TrainingBatch) -> dict[str, float]:
        """Add the gradient of a mini-batch's value loss to the parameters; every trajectory counts the same."""
        by_sequence = token_weights(batch.loss_mask, "sequence_mean")
        by_token = token_weights(batch.loss_mask, "token_mean")
        sums: dict[str, float] = defaultdict(float)
        for rows in micro_batch_rows(batch, self._cfg, self._cfg.micro_train_batch_size_per_gpu):
            part = batch.select(rows).to(self.model.device)
            of_loss, of_metrics = (weights[rows].to(self.model.device) for weights in (by_sequence, by_token))
            with checkpointed_layers(self.model):
                values = self._values(part)
                assert part.values is not None, "the trainer scores before it updates"
                assert part.returns is not None, "the trainer computes returns before it updates"
                token_loss, metrics = value_loss(values, part.values, part.returns, self._cfg.algorithm.value_clip)
                loss = weighted_sum(token_loss, of_loss)
                loss.backward()
            sums["critic_loss"] += loss.item()
            sums["values_mean"] += weighted_sum(values.detach(), of_metrics).item()
            sums["values_clipfrac"] += weighted_sum(metrics["values_clipfrac"], of_metrics).item()
        return {f"critic/{name}": total for name, total in sums.items()}

    def _values(self, part: TrainingBatch) -> torch.Tensor:
        with autocast(self.model.device, self._cfg.bf16):
            return response_values(self.model, part.sequences, part.attention_mask, part.loss_mask)
