"""The policy: a model and its optimizer. One call of `update` is one optimizer step on one mini-batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.algorithms.kl import approximate_kl
from skyrl_train.algorithms.reduction import token_weights, weighted_sum
from skyrl_train.algorithms.registry import PolicyLoss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.trainer import TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.types import TrainingBatch
from skyrl_train.workers.random_state import random_state, set_random_state
from skyrl_train.workers.scoring import micro_batch_logprobs, micro_batch_rows, score_logprobs

logger = logging.getLogger(__name__)

SHARD = "world_size_1_rank_0.pt"


class PolicyWorker:
    """Owns the policy's weights, optimizer and learning-rate schedule."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cfg: TrainerConfig,
        policy_loss: PolicyLoss,
        n_optimizer_steps: int,
    ) -> None:
        """`n_optimizer_steps` is the length of the whole run, which the schedule is laid over."""
        optimizer_config = cfg.policy.optimizer_config
        self.model = model
        self._tokenizer = tokenizer
        self._cfg = cfg
        self._policy_loss = policy_loss
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer_config.lr,
            betas=optimizer_config.adam_betas,
            weight_decay=optimizer_config.weight_decay,
        )
        self._scheduler = get_scheduler(
            optimizer_config.scheduler,
            self._optimizer,
            num_warmup_steps=optimizer_config.num_warmup_steps,
            num_training_steps=n_optimizer_steps,
        )

    def score(self, batch: TrainingBatch) -> torch.Tensor:
        """Log-probs (B, R) of the batch's sampled tokens under the current weights."""
        return score_logprobs(self.model, batch, self._cfg)

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """One optimizer step on a mini-batch; returns its metrics."""
        return self.forward_backward(batch) | self.optim_step()

    def optim_step(self) -> dict[str, float]:
        """Clip the accumulated gradients and apply them.

        Gradients that are not finite are thrown away and counted in `policy/skipped_updates`.
        """
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.model.parameters(), self._cfg.policy.optimizer_config.max_grad_norm
        )
        metrics = {"policy/policy_lr": self._scheduler.get_last_lr()[0], "policy/skipped_updates": 0.0}
        if grad_norm.isfinite():
            metrics["policy/grad_norm"] = grad_norm.item()
            self._optimizer.step()
            self._scheduler.step()
        else:
            metrics["policy/skipped_updates"] = 1.0
            logger.warning("The gradient norm is %s: this update is skipped", grad_norm.item())
        self._optimizer.zero_grad(set_to_none=True)
        return metrics

    def forward_backward(self, batch: TrainingBatch) -> dict[str, float]:
        """Add the gradient of a mini-batch's loss to the parameters; returns its metrics.

        The mini-batch is worked through in micro-batches, each scaled by the divisors of the whole. Without
        `old_logprobs` the batch is the only one since its rollouts, and the current log-probs are the old ones.
        """
        weights = _Weights.of(batch.loss_mask, self._cfg.algorithm)
        sums: dict[str, torch.Tensor] = {}
        for rows in micro_batch_rows(batch, self._cfg, self._cfg.micro_train_batch_size_per_gpu):
            part = batch.select(rows).to(self.model.device)
            with _checkpointed_layers(self.model):
                terms = self._loss_terms(part, weights.select(rows).to(self.model.device))
                terms["final_loss"].backward()
            for name, value in terms.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return {f"policy/{name}": total.item() for name, total in sums.items()}

    def _loss_terms(self, part: TrainingBatch, weights: _Weights) -> dict[str, torch.Tensor]:
        """A micro-batch's share of each scalar of its mini-batch: `final_loss`, what it is made of, and metrics."""
        algorithm = self._cfg.algorithm
        log_probs, entropy = micro_batch_logprobs(self.model, part, self._cfg)  # (b, R)
        old_logprobs = log_probs.detach() if part.old_logprobs is None else part.old_logprobs
        assert part.advantages is not None, "the trainer computes advantages before it updates"
        token_loss, token_metrics = self._policy_loss(
            log_probs, old_logprobs, part.advantages, algorithm, part.loss_mask, part.rollout_logprobs
        )
        if token_loss.shape != part.loss_mask.shape:
            raise ConfigError(
                f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} returned a loss of shape "
                f"{tuple(token_loss.shape)} for log-probs of shape {tuple(part.loss_mask.shape)}; return the loss of "
                "each token: trainer.algorithm.loss_reduction makes one number of them"
            )
        terms = {name: weighted_sum(values, weights.per_token) for name, values in token_metrics.items()}
        if part.rollout_logprobs is not None:
            gap = (old_logprobs - part.rollout_logprobs).abs()
            terms["rollout_train_logprobs_abs_diff_mean"] = weighted_sum(gap, weights.per_token)
        terms["policy_entropy"] = weighted_sum(entropy, weights.per_sequence)
        terms["policy_loss"] = weighted_sum(token_loss, weights.loss)
        terms["final_loss"] = terms["policy_loss"]
        if part.ref_logprobs is not None:
            kl = approximate_kl(log_probs, part.ref_logprobs, algorithm.kl_estimator_type)
            terms["policy_kl"] = weighted_sum(kl, weights.per_sequence)
            terms["final_loss"] = terms["final_loss"] + algorithm.kl_loss_coef * terms["policy_kl"]
        if algorithm.use_entropy_loss:
            terms["final_loss"] = terms["final_loss"] - algorithm.entropy_loss_coef * terms["policy_entropy"]
        return terms

    def checkpoint_bytes(self) -> int:
        """About how large `save` makes a folder: the weights and two moments of the same size."""
        return 3 * sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state into `folder`, with the tokenizer and configuration."""
        folder.mkdir(parents=True)
        torch.save(self.model.state_dict(), folder / f"model_{SHARD}")
        torch.save(self._optimizer.state_dict(), folder / f"optim_{SHARD}")
        extra = {"lr_scheduler": self._scheduler.state_dict(), "rng": random_state()}
        torch.save(extra, folder / f"extra_state_{SHARD}")
        self.model.config.save_pretrained(folder / "huggingface")
        self._tokenizer.save_pretrained(folder / "huggingface")

    def load(self, folder: Path) -> None:
        """Take over everything `save` wrote.

        Raises:
            CheckpointError: a file is missing, or belongs to another model.
        """
        try:
            # In place: the engine generates with these very tensors.
            self.model.load_state_dict(_load(folder / f"model_{SHARD}"))
            self._optimizer.load_state_dict(_load(folder / f"optim_{SHARD}"))
            extra = _load(folder / f"extra_state_{SHARD}")
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"cannot resume the policy from {folder}: {error}; it must hold a complete checkpoint of the same model"
            ) from error
        self._scheduler.load_state_dict(extra["lr_scheduler"])
        set_random_state(extra["rng"])

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face folder."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class _Weights:
    """What each token (B, R) counts in the sums of a mini-batch; zero outside the loss mask."""

    loss: torch.Tensor  # by trainer.algorithm.loss_reduction
    per_token: torch.Tensor  # every token the same
    per_sequence: torch.Tensor  # every trajectory the same

    @staticmethod
    def of(loss_mask: torch.Tensor, algorithm: AlgorithmConfig) -> _Weights:
        return _Weights(
            token_weights(loss_mask, algorithm.loss_reduction, algorithm.max_seq_len),
            token_weights(loss_mask, "token_mean"),
            token_weights(loss_mask, "sequence_mean"),
        )

    def select(self, rows: Sequence[int]) -> _Weights:
        return _Weights(self.loss[rows], self.per_token[rows], self.per_sequence[rows])

    def to(self, device: torch.device) -> _Weights:
        return _Weights(self.loss.to(device), self.per_token.to(device), self.per_sequence.to(device))


@contextmanager
def _checkpointed_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let layers recompute their activations, if gradient checkpointing is on.

    Transformers checkpoints a layer only while it is in training mode; everything inside it stays in evaluation
    mode, so that dropout never makes the trained log-probs differ from the engine's.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
