"""A model with its head as one module, whose forward pass a strategy may wrap."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.models.logprobs import response_logprobs
from skyrl_train.models.value_head import response_values
from skyrl_train.types import Scores, TokenScores, TrainingBatch, ValueScores


class ScoringModule(torch.nn.Module):
    """Scores the tokens with loss mask 1 with a language model or a critic.

    Body and head are called inside of one forward pass, so that FSDP can gather the parameters of both, and the head
    runs on trained positions only.
    """

    def __init__(
        self, model: PreTrainedModel, *, temperature: float = 1.0, entropy_grad: bool = False, is_critic: bool = False
    ) -> None:
        """`temperature` divides logits; `entropy_grad`: entropies are differentiable, for two more values per logit."""
        super().__init__()
        self.model = model
        self._temperature = temperature
        self._entropy_grad = entropy_grad
        self.scores_type: type[TokenScores | ValueScores] = ValueScores if is_critic else TokenScores

    def forward(self, sequences: torch.Tensor, attention_mask: torch.Tensor, loss_mask: torch.Tensor) -> Scores:
        """Return scores (B, R), 0 outside of the mask, for `sequences` (B, L) and `loss_mask` (B, R)."""
        if self.scores_type is ValueScores:
            return ValueScores(response_values(self.model, sequences, attention_mask, loss_mask))
        return response_logprobs(
            self.model, sequences, attention_mask, loss_mask, self._temperature, entropy_grad=self._entropy_grad
        )

    def score(self, rows: TrainingBatch) -> Scores:
        """Return the scores of a micro-batch."""
        scores: Scores = self(rows.sequences, rows.attention_mask, rows.loss_mask)
        return scores
