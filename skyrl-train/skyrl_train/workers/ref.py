"""The reference: the policy as it was before training, frozen."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.scoring import score_logprobs


class RefWorker:
    """Scores log-probs of a model that does not learn."""

    def __init__(self, model: PreTrainedModel, cfg: TrainerConfig) -> None:
        self.model = model.requires_grad_(False)
        self._cfg = cfg

    def score(self, batch: TrainingBatch) -> torch.Tensor:
        """Log-probs (B, R) of the batch's sampled tokens."""
        return score_logprobs(self.model, batch, self._cfg)
