"""A model that learns: weights, optimizer, learning-rate schedule, and how they are saved."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from skyrl_train.config.policy import OptimizerConfig
from skyrl_train.errors import CheckpointError
from skyrl_train.workers.random_state import random_state, set_random_state

logger = logging.getLogger(__name__)

SHARD = "world_size_1_rank_0.pt"


class TrainedModel:
    """The state that the policy and the critic have in common. `role` names it in metrics and messages."""

    role: Literal["policy", "critic"]

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer_config: OptimizerConfig,
        n_optimizer_steps: int,
    ) -> None:
        """`n_optimizer_steps` is the length of the whole run, which the schedule is laid over."""
        self.model = model
        self._tokenizer = tokenizer
        self._max_grad_norm = optimizer_config.max_grad_norm
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

    def optim_step(self) -> dict[str, float]:
        """Clip the accumulated gradients and apply them.

        Gradients that are not finite are thrown away and counted in `<role>/skipped_updates`.
        """
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        metrics = {f"{self.role}_lr": self._scheduler.get_last_lr()[0], "skipped_updates": 0.0}
        if grad_norm.isfinite():
            if any(parameter.grad is not None for parameter in self.model.parameters()):
                metrics["grad_norm"] = grad_norm.item()
            self._optimizer.step()  # without a gradient, from a mini-batch without a trained token, nothing moves
            self._scheduler.step()
        else:
            metrics["skipped_updates"] = 1.0
            logger.warning("The gradient norm of the %s is %s: this update is skipped", self.role, grad_norm.item())
        self._optimizer.zero_grad(set_to_none=True)
        return {f"{self.role}/{name}": value for name, value in metrics.items()}

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
            # In place: the engine generates with the policy's very tensors.
            self.model.load_state_dict(_load(folder / f"model_{SHARD}"))
            self._optimizer.load_state_dict(_load(folder / f"optim_{SHARD}"))
            extra = _load(folder / f"extra_state_{SHARD}")
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"cannot resume the {self.role} from {folder}: {error}; it must hold a complete checkpoint of the same "
                "model"
            ) from error
        self._scheduler.load_state_dict(extra["lr_scheduler"])
        set_random_state(extra["rng"])

    def export(self, folder: Path) -> None:
        """Write a plain Hugging Face folder."""
        self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)
