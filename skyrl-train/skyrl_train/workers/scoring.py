"""What a model says about a whole batch, computed micro-batch by micro-batch without gradient."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.dataset.batch import micro_batches
from skyrl_train.models.loading import autocast
from skyrl_train.models.logprobs import TokenScores, response_logprobs
from skyrl_train.types import TrainingBatch


@torch.no_grad()
def score_tokens(model: PreTrainedModel, batch: TrainingBatch, cfg: TrainerConfig) -> TokenScores:
    """What `model` says about the batch's sampled tokens, each (B, R), 0 elsewhere, on the CPU."""
    scores = TokenScores(*(torch.zeros_like(batch.loss_mask) for _ in TokenScores._fields))
    for rows in micro_batch_rows(batch, cfg, cfg.micro_forward_batch_size_per_gpu):
        part = batch.select(rows).to(model.device)
        for column, values in zip(scores, micro_batch_scores(model, part, cfg), strict=True):
            column[rows] = values.cpu()
    return scores


def micro_batch_scores(model: PreTrainedModel, batch: TrainingBatch, cfg: TrainerConfig) -> TokenScores:
    """What `model` says about the sampled tokens of one micro-batch (B, R), with gradient where it is enabled."""
    with autocast(model.device, cfg.bf16):
        return response_logprobs(
            model,
            batch.sequences,
            batch.attention_mask,
            batch.loss_mask,
            cfg.algorithm.temperature,
            entropy_grad=cfg.algorithm.use_entropy_loss,
        )


def micro_batch_rows(batch: TrainingBatch, cfg: TrainerConfig, max_rows: int | None) -> list[list[int]]:
    """The rows of each micro-batch; rows without a trained token need no pass and are left out."""
    trained = [row for row, n_tokens in enumerate(batch.loss_mask.sum(dim=1).tolist()) if n_tokens > 0]
    lengths = batch.attention_mask.sum(dim=1).tolist()
    parts = micro_batches([lengths[row] for row in trained], cfg.max_tokens_per_microbatch, max_rows)
    return [[trained[i] for i in part] for part in parts]
